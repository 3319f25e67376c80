"""Changed elements of a piece: find them, pack an index of them, read their values and write these elsewhere.

Elements are compared, read and written as integers of their size, so every bit counts: a NaN equals itself, and 0 and
-0 differ. Positions count the elements of a piece in row-major order, wherever the piece lies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.hybrid_engine.delta_sizes import Form, mask_bytes
from megatron_rl.hybrid_engine.layout import Region

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPREAD = 0x0102040810204080
"""Moves the lowest bits of the 8 bytes of a word next to each other, into its highest byte, by a product."""


def as_bits(tensor: Tensor) -> Tensor:
    """Return a view of the tensor's memory as integers of its elements' size."""
    return tensor.view(INTEGERS[tensor.element_size()])


def packed_bits(flags: Tensor) -> Tensor:
    """bool [n] -> uint8 [n / 8, rounded up]; flag i is bit i % 8 of byte i // 8."""
    padded = torch.zeros(mask_bytes(flags.numel()) * 8, dtype=torch.bool, device=flags.device)
    padded[: flags.numel()] = flags
    return (padded.view(torch.int64) * SPREAD).bitwise_right_shift_(56).to(torch.uint8)


def unpacked_bits(packed: Tensor, numel: int) -> Tensor:
    """The bool [numel] of which `packed` was made."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1).bitwise_right_shift(shifts) & 1).bool().flatten()[:numel]


def index_of(changed: Tensor, form: Form) -> Tensor:
    """The index, uint8, of the true elements of bool [n]; see `delta_sizes`."""
    if form is Form.POSITIONS:
        return changed.nonzero().flatten().to(torch.int32).view(torch.uint8)
    if form is Form.MASK:
        return packed_bits(changed)
    return torch.empty(0, dtype=torch.uint8, device=changed.device)


def elements_at(region: Region, positions: Tensor) -> Tensor:
    """Places in a buffer, int64, of the elements of `region` at some positions."""
    rest = positions.to(torch.int64)
    places = torch.full_like(rest, region.offset)
    for size, step in zip(reversed(region.shape), reversed(region.stride), strict=True):
        places += rest.remainder(size) * step
        rest = rest.div(size, rounding_mode="floor")
    return places


def view_of(buffer: Tensor, region: Region) -> Tensor:
    """The elements of a region."""
    return buffer.as_strided(region.shape, region.stride, region.offset)


def read_values(buffer: Tensor, region: Region, form: Form, index: Tensor) -> Tensor:
    """The elements [n] of a region that an index names, in order. buffer: integers."""
    if form is Form.POSITIONS:
        return buffer[elements_at(region, index.view(torch.int32))]
    view = view_of(buffer, region)
    if form is Form.MASK:
        return view[unpacked_bits(index, region.numel).view(region.shape)]
    return view.flatten()


def write_values(buffer: Tensor, region: Region, form: Form, index: Tensor, values: Tensor) -> None:
    """Write what `read_values` returned for the same piece in another buffer."""
    if form is Form.POSITIONS:
        buffer[elements_at(region, index.view(torch.int32))] = values
    elif form is Form.MASK:
        view_of(buffer, region).masked_scatter_(unpacked_bits(index, region.numel).view(region.shape), values)
    else:
        view_of(buffer, region).copy_(values.view(region.shape))
