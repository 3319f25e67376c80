"""Numbers of 4 bits that share a power of two, MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss is published.

A tensor [.., columns] is stored as two of bytes: NAME_blocks [.., columns / 32, 16], of which each byte holds two
codes, that of the earlier column in its lower half; and NAME_scales [.., columns / 32], exponents e of 2^(e - 127).
Rows are outputs and columns inputs, also where the tensor itself would be transposed.
"""

from __future__ import annotations

import torch

GROUP = 32
"""Columns that share an exponent."""
EXPONENT_OF_ONE = 127
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of codes 0 to 7; code 8 + i is -POSITIVE[i]."""


def unpacked(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks uint8 [.., G, 16] and scales uint8 [.., G] -> float32 [.., 32 G], which bfloat16 holds exactly."""
    values = torch.tensor([*POSITIVE, *(-value for value in POSITIVE)], dtype=torch.float32)
    pairs = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - EXPONENT_OF_ONE
    return torch.ldexp(values[pairs.long()], exponents[..., None]).flatten(-2)
