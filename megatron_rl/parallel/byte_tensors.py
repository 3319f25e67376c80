"""Tensors as their bytes: pure interval arithmetic, so that tensors of several dtypes move as one.

A tensor of elements of `size` bytes becomes one with a further, last dim of `size` bytes, which nothing cuts. So every
layout cuts its bytes as it cuts its elements.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.parallel.sharding import LogicalTensor, Part, Shard


def as_bytes_of(tensor: LogicalTensor, size: int) -> LogicalTensor:
    """The bytes of a logical tensor whose elements have `size` bytes."""
    segments = tuple(segment._replace(shape=(*segment.shape, size)) for segment in tensor.segments)
    return replace(tensor, segments=segments)


def bytes_shard(shard: Shard, size: int) -> Shard:
    """The shard of the bytes next to a shard of the elements."""
    parts = (Part(part.segment, (*part.box, (0, size)), (*part.at, 0)) for part in shard.parts)
    return Shard((*shard.shape, size), tuple(parts))
