"""A soft penalty for answers that come close to the longest allowed."""

from __future__ import annotations

import torch


def overlong_penalty(lengths: torch.Tensor, max_length: int, buffer: int, factor: float) -> torch.Tensor:
    """float32 [B], <= 0, to add to the scores of answers of `lengths` int64 [B] tokens, at most `max_length`.

    0 up to max_length - buffer, then falling linearly to -factor at max_length (DAPO: Yu et al., arXiv:2503.14476,
    eq. 13). buffer >= 1.
    """
    excess = (lengths - (max_length - buffer)).clamp(min=0)
    return -factor * excess.float() / buffer
