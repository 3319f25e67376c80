"""Weights as e4m3 codes with one float32 scale for each square block (DeepSeek-V3, arXiv:2412.19437, section 3.3).

A scale is the smallest power of two with which the block's largest element is at most 448, e4m3's largest number. So
code times scale is exact in bfloat16 and float32, and equals what products in FP8 read when they train with
blockwise scales (`model/eight_bits.py`). Equal elements give equal codes and scales on every rank: a maximum does not
depend on an order, and nothing is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
CODE, SCALE = torch.uint8, torch.float32
"""Types of the buffers. Codes travel as bytes, which every backend knows."""
PLACED_TO_CODE = 2.0**120
"""bfloat16's exponents begin 120 below those of e4m3."""
SIGN_AND_NUMBER = -(1 << 15) + (0x7F << 4)
"""Bits of an int16: the sign, and exponent and fraction of a code four places up."""
MOST_ELEMENTS = 1 << 20
"""Elements that are quantized at once: a few MB of scratch memory, however large the weight."""


def power_of_two_scales(most: Tensor) -> Tensor:
    """The scales of blocks with these largest absolute values, in float32 and of the same shape."""
    quotient = most.float().clamp(min=torch.finfo(SCALE).tiny * LARGEST) / LARGEST
    mantissa, exponent = torch.frexp(quotient)  # quotient = mantissa * 2^exponent, 0.5 <= mantissa < 1
    scales = torch.ldexp(torch.ones_like(quotient), exponent - (mantissa == 0.5).to(exponent.dtype))
    # A weight that is not finite must not look like one that is.
    return torch.where(quotient.isfinite(), scales, quotient)


def quantize(weight: Tensor, block: int, codes: Tensor, scales: Tensor) -> None:
    """Write the codes (bytes, [R, C]) and scales (float32, [R / block, C / block]) of a weight [R, C].

    R and C must be multiples of `block`.
    """
    num_rows, num_columns = weight.shape
    strip = max(1, MOST_ELEMENTS // (block * num_columns)) * block
    for start in range(0, num_rows, strip):
        rows = slice(start, min(start + strip, num_rows))
        tiles = as_blocks(weight[rows].float(), block)
        scale = power_of_two_scales(tiles.abs().amax((1, 3)))
        scales[rows.start // block : rows.stop // block] = scale
        codes[rows] = (tiles / scale[:, None, :, None]).to(E4M3).view(-1, num_columns).view(CODE)


def dequantized(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [R, C] in `dtype`. codes: e4m3 [R, C]; scales: float32 [R / block, C / block], of at most 2^7.

    A code's sign, exponent and fraction are put into their places in bfloat16, which divides its number by 2^120. That
    is many times as fast as torch's conversion on a CPU, and equal to it for all numbers; not for NaN, for which scales
    are not finite.
    """
    block = codes.shape[0] // scales.shape[0]
    placed = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(4)  # the sign is in all upper bits
    tiles = as_blocks(placed.bitwise_and_(SIGN_AND_NUMBER).view(torch.bfloat16), block)
    # A code has 4 bits of its own and a scale none: their product is exact in bfloat16.
    tiles.mul_((scales * PLACED_TO_CODE).to(torch.bfloat16)[:, None, :, None])
    return tiles.view(codes.shape).to(dtype)


def as_blocks(matrix: Tensor, block: int) -> Tensor:
    """A matrix [R, C] as [R / block, block, C / block, block]."""
    blocks: Tensor = matrix.unflatten(1, (-1, block)).unflatten(0, (-1, block))
    return blocks
