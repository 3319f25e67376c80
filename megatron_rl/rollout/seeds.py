"""One seed per request, so that samples do not depend on the layout."""

from __future__ import annotations

import hashlib


def request_seed(run_seed: int, salt: int, prompt_index: int, sample: int, attempt: int = 0, num_drawn: int = 0) -> int:
    """Seed of one request, in [0, 2^63). It depends on the request and not on the rank that generates.

    attempt: number of restarts of the response with other seeds. num_drawn: number of tokens that it had when an engine
    last began it; a continued response has a seed of its own.
    """
    asked = f"{run_seed},{salt},{prompt_index},{sample}"
    if attempt or num_drawn:
        asked += f",{attempt},{num_drawn}"
    digest = hashlib.blake2b(asked.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
