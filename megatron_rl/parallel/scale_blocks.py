"""Cut the scales of a matrix's square blocks as its elements are cut: pure interval arithmetic.

A matrix [rows, columns] in blocks of `block` x `block` elements has one scale for each block: [rows / block,
columns / block]. A layout fits if every cut and every border between stacked segments is between two blocks. Then
the scales are one more logical tensor, whose shards are those of the matrix, divided by the block. Experts are a stack
of matrices [experts, rows, columns], of which each has its own scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megatron_rl.parallel.sharding import LogicalTensor, Part, Place, Segment, Shard, box_shape, shard_of

SCALES = "_scale_inv"
"""What follows the name of a weight in the name of its scales, as vLLM and DeepSeek-V3 name them."""


def scales_of(tensor: LogicalTensor, block: int) -> LogicalTensor:
    """The scales of a matrix, or of a stack of them. Raises ValueError, with the sizes, where a segment is not made of
    whole blocks.
    """
    segments = []
    for segment in tensor.segments:
        if any(size % block for size in segment.shape[-2:]):
            raise ValueError(f"{tensor.name}.{segment.name} {segment.shape} is not made of blocks of {block} x {block}")
        units = segment.num_units
        if tensor.tp_dim is not None:
            size = segment.shape[tensor.tp_dim]
            # Several units to a block, or several blocks to a unit: what no cut in whole blocks and units divides.
            units = size // math.lcm(size // units, block)
        segments.append(Segment(segment.name, _in_blocks(segment.shape, block), units))
    return LogicalTensor(tensor.name + SCALES, tuple(segments), tensor.tp_dim, tensor.is_expert)


def scales_shard(shard: Shard, block: int) -> Shard:
    """The shard of the scales next to a shard of their matrix, in which blocks are whole."""

    def part(cut: Part) -> Part:
        starts, stops = zip(*cut.box, strict=True)
        box = zip(_in_blocks(starts, block), _in_blocks(stops, block), strict=True)
        return Part(cut.segment, tuple(box), _in_blocks(cut.at, block))

    return Shard(_in_blocks(shard.shape, block), tuple(map(part, shard.parts)))


def common_extent(tensors: Iterable[LogicalTensor], places: Iterable[Place]) -> int:
    """The largest block of which every piece of every tensor is made at these places; 0 without tensors.

    A block fits if it divides this number. Raises ValueError for a tensor that cannot be cut.
    """
    extent, where = 0, tuple(places)
    for alike in {tensor.alike: tensor for tensor in tensors}.values():
        for place in where:
            for part in shard_of(alike, place).parts:
                # Pieces of one segment have equal sizes, so that each starts at a multiple of its size.
                extent = math.gcd(extent, *box_shape(part.box)[-2:])
    return extent


def _in_blocks(numbers: Sequence[int], block: int) -> tuple[int, ...]:
    """Numbers of elements, or places of elements, of every dim; in blocks along rows and columns."""
    return (*numbers[:-2], *(number // block for number in numbers[-2:]))
