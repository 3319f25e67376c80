"""One seed per request, so that samples do not depend on the layout."""

from __future__ import annotations

import hashlib


def request_seed(run_seed: int, salt: int, prompt_index: int, sample: int, attempt: int = 0, num_drawn: int = 0) -> int:
    """Seed of one request: a function of what is asked, never of which rank answers. In [0, 2^63).

    attempt: how often the answer was begun anew with other seeds. num_drawn: tokens that it had when the engine last
    began it, whose random numbers go on from a seed of their own.
    """
    asked = f"{run_seed},{salt},{prompt_index},{sample}"
    if attempt or num_drawn:
        asked += f",{attempt},{num_drawn}"
    digest = hashlib.blake2b(asked.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
