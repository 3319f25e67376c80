"""The places of tensors in flat buffers: slots, and the strided regions of boxes in them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_rl.parallel.sharding import Box, Shard, box_numel, box_shape, length

FOREIGN = -1
"""Number of the buffer for shards that training does not have; training's own buffers count from 0."""


class Region(NamedTuple):
    """Strided elements of one buffer, visited in row-major order; offset and strides in elements."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        return len(self.shape) == 1 and self.stride == (1,)

    def collapsed(self) -> Region:
        """Return the region with as few dims as possible; elements and their order stay."""
        shape: list[int] = []
        stride: list[int] = []
        for size, step in zip(self.shape, self.stride, strict=True):
            if size == 1:
                continue
            if stride and stride[-1] == size * step:
                shape[-1], stride[-1] = shape[-1] * size, step
            else:
                shape.append(size)
                stride.append(step)
        return Region(self.buffer, self.offset, tuple(shape) or (1,), tuple(stride) or (1,))

    def continues(self, other: Region) -> bool:
        """Whether this region starts where `other` ends, both without gaps."""
        return (
            self.buffer == other.buffer
            and self.is_contiguous
            and other.is_contiguous
            and self.offset == other.offset + other.numel
        )


@dataclass(frozen=True)
class Slot:
    """One rank's shard of a logical tensor, without gaps in a flat buffer; `offset` in elements."""

    name: str
    buffer: int
    offset: int
    shard: Shard

    @property
    def stop(self) -> int:
        return self.offset + self.shard.numel

    @cached_property
    def stride(self) -> tuple[int, ...]:
        shape = self.shard.shape
        return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))

    def region(self, segment: int, box: Box) -> Region:
        """The region of `box` of a segment; one dim per dim of the box. The box must be inside one of the parts."""
        for part in self.shard.parts:
            if part.segment != segment:
                continue
            offset = self.offset
            for at, (start, stop), (low, high), step in zip(part.at, part.box, box, self.stride, strict=True):
                if low < start or high > stop:
                    break
                offset += (at + low - start) * step
            else:
                return Region(self.buffer, offset, box_shape(box), self.stride)
        raise ValueError(f"{self.name}: {box} of segment {segment} is not in {self.shard.parts}")


def split_box(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `limit` elements, in row-major order of the elements."""
    if box_numel(box) <= limit:
        yield box
        return
    dim = next(dim for dim, interval in enumerate(box) if length(interval) > 1)
    rows_per_part = max(1, limit // box_numel(box[dim + 1 :]))
    start, stop = box[dim]
    for row in range(start, stop, rows_per_part):
        yield from split_box((*box[:dim], (row, min(row + rows_per_part, stop)), *box[dim + 1 :]), limit)


def merged(regions: Iterator[Region]) -> tuple[Region, ...]:
    """The regions, which must be collapsed, with those that continue each other joined."""
    joined: list[Region] = []
    for region in regions:
        if joined and region.continues(joined[-1]):
            last = joined[-1]
            joined[-1] = Region(last.buffer, last.offset, (last.numel + region.numel,), (1,))
        else:
            joined.append(region)
    return tuple(joined)
