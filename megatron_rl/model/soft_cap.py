"""Soft caps: numbers x become c tanh(x / c) for a cap c (Gemma 2, arXiv:2408.00118)."""

from __future__ import annotations

from torch import Tensor


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Cap x in place. cap: c; None: leave x as it is."""
    return x if cap is None else x.div_(cap).tanh_().mul_(cap)


def cap_slope(x: Tensor, cap: float) -> Tensor:
    """Return the derivative 1 - tanh^2 where capped numbers x are given; 0 where one is -inf."""
    return (x / cap).square_().neg_().add_(1.0).clamp_(min=0.0)
