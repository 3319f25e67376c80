"""One seed per request, so that samples do not depend on the layout."""

from __future__ import annotations

import hashlib


def request_seed(run_seed: int, salt: int, prompt_index: int, sample: int) -> int:
    """Seed of one request: a function of what is asked, never of which rank answers. In [0, 2^63)."""
    digest = hashlib.blake2b(f"{run_seed},{salt},{prompt_index},{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
