"""Muon's arithmetic: the orthogonalized update of one matrix (Jordan et al., https://kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MOMENTUM = "momentum_buffer"
"""Muon's state of a parameter, in place of Adam's two moments."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the odd quintic, the same in every step, as torch.optim.Muon's."""
SMALLEST_NORM = 1e-7


def orthogonalize(matrix: Tensor, num_steps: int, dtype: torch.dtype) -> Tensor:
    """Return [n, m] with the singular vectors of `matrix` and singular values near 1, in float32.

    dtype: in which the products are computed; in bfloat16 they are torch.optim.Muon's, bit for bit.
    """
    first, second, third = NEWTON_SCHULZ
    is_tall = matrix.size(0) > matrix.size(1)
    # Products with the shorter side are fewer.
    near = (matrix.T if is_tall else matrix).to(dtype)
    near = near / near.norm().clamp(min=SMALLEST_NORM)
    for _ in range(num_steps):
        gram = near @ near.T
        near = torch.addmm(near, torch.addmm(gram, gram, gram, beta=second, alpha=third), near, beta=first)
    return (near.T if is_tall else near).to(torch.float32)


def scale_factor(num_rows: int, num_columns: int, mode: str) -> float:
    """Return the factor of an orthogonalized update, by Megatron's names."""
    factors = {
        "spectral": math.sqrt(max(num_rows, num_columns)),
        "unit_rms_norm": math.sqrt(num_rows / num_columns),
        "shape_scaling": math.sqrt(max(1, num_rows / num_columns)),
    }
    return factors[mode]
