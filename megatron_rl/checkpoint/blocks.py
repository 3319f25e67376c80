"""Find the boxes of a whole tensor in a run of a rank's flattened shard: pure interval arithmetic.

A distributed optimizer gives each data-parallel rank a run [start, stop) of a parameter's flattened shard, wherever its
buffer happens to be cut. A checkpoint that any layout can read knows no runs, only boxes of whole tensors. A run is a
few boxes of the shard (part of a row, whole rows, part of a row), and each of them is a few boxes of segments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_rl.parallel.sharding import Box, Shard, box_index, box_shape, intersect


@dataclass(frozen=True)
class Block:
    """The box `box` of segment number `segment`, and where a shard holds it.

    The elements [start, start + prod(shape)) of the flattened shard, seen as `shape` and indexed with `index`.
    """

    segment: int
    box: Box
    start: int
    shape: tuple[int, ...]
    index: tuple[slice, ...]

    def view(self, flat: torch.Tensor, first: int) -> torch.Tensor:
        """The block as a view of `flat` [n], which holds the shard's elements from number `first` on."""
        begin = self.start - first
        return flat[begin : begin + math.prod(self.shape)].view(self.shape)[self.index]


def blocks_of(shard: Shard, start: int, stop: int) -> list[Block]:
    """The blocks that make up the run [start, stop) of a flattened shard, without its padding."""
    return [block for first, box in boxes_of_run(shard.shape, start, stop) for block in _cut_box(shard, first, box)]


def boxes_of_run(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """(first element, box) for the fewest boxes that make up the run [start, stop) of a flattened tensor, in order.

    Each box is itself a run. A run that is empty has none.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield start, ((start, stop),)
        return
    row = math.prod(shape[1:])
    first_whole, last_whole = -(-start // row), stop // row
    if first_whole > last_whole:  # inside one row
        yield from _boxes_in_row(shape, start // row, start, stop)
        return
    yield from _boxes_in_row(shape, start // row, start, first_whole * row)
    if first_whole < last_whole:
        yield first_whole * row, ((first_whole, last_whole), *((0, size) for size in shape[1:]))
    yield from _boxes_in_row(shape, last_whole, last_whole * row, stop)


def _boxes_in_row(shape: tuple[int, ...], number: int, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    before = number * math.prod(shape[1:])
    for first, box in boxes_of_run(shape[1:], start - before, stop - before):
        yield first + before, ((number, number + 1), *box)


def _cut_box(shard: Shard, first: int, box: Box) -> Iterator[Block]:
    """The parts of a shard's box that belong to segments; the rest is padding."""
    corner = [low for low, _ in box]
    for part in shard.parts:
        inside = tuple((at, at + size) for at, size in zip(part.at, box_shape(part.box), strict=True))
        common = intersect(box, inside)
        if common is None:
            continue
        shift = [low - at for (low, _), at in zip(part.box, part.at, strict=True)]
        yield Block(
            segment=part.segment,
            box=tuple((low + by, high + by) for (low, high), by in zip(common, shift, strict=True)),
            start=first,
            shape=box_shape(box),
            index=box_index(tuple((low - at, high - at) for (low, high), at in zip(common, corner, strict=True))),
        )
