"""What ranks hold of a rollout with FP8 weights, as three exchanges move it: codes, scales, and what stays.

Pure data: the planner counts with the members that a run exchanges with. Tensors of several dtypes move as one as their
bytes: one of elements of `size` bytes gets a further, last dim of `size` bytes, which nothing cuts, so that every
layout cuts its bytes as it cuts its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megatron_rl.hybrid_engine.layout import Slot
from megatron_rl.hybrid_engine.plan import Member, aligned
from megatron_rl.parallel.scale_blocks import SCALES, scales_of, scales_shard
from megatron_rl.parallel.sharding import LogicalTensor, Part, Shard

CODE_BYTES, SCALE_BYTES = 1, 4
"""Bytes of the code of one element, and of the scale of one block."""


class EightBitMembers(NamedTuple):
    """The members of the three exchanges of one group: of codes, of scales, and of what stays as it is trained."""

    codes: list[Member]
    scales: list[Member]
    kept: list[Member]


@dataclass(frozen=True)
class EightBitTensors:
    """The logical tensors of a model whose linears are quantized in blocks of `block` x `block` elements.

    codes: those that are quantized, by name; a code is where its element is. kept: all others.
    """

    block: int
    codes: Mapping[str, LogicalTensor]
    kept: Mapping[str, LogicalTensor]

    @classmethod
    def of(cls, tensors: Mapping[str, LogicalTensor], quantized: set[str], block: int) -> EightBitTensors:
        """Divide a model's tensors. quantized: names."""
        codes = {name: tensor for name, tensor in tensors.items() if name in quantized}
        return cls(block, codes, {name: tensor for name, tensor in tensors.items() if name not in quantized})

    @cached_property
    def scales(self) -> dict[str, LogicalTensor]:
        """The scales of the codes. Raises ValueError where a matrix is not made of whole blocks."""
        scales = [scales_of(tensor, self.block) for tensor in self.codes.values()]
        return {tensor.name: tensor for tensor in scales}

    def members(self, members: Sequence[Member]) -> EightBitMembers:
        """The members of the three exchanges. members: with all training shards in training's buffers.

        Codes and scales are in buffers of their own, in the order of the training shards.
        """
        return EightBitMembers(
            [replace(member, held=self._packed(member, _as_it_is)) for member in members],
            [replace(member, held=self._packed(member, self._scales_slot)) for member in members],
            [replace(member, held=tuple(slot for slot in member.held if slot.name in self.kept)) for member in members],
        )

    def as_bytes(self, element: int) -> dict[str, LogicalTensor]:
        """Codes, scales and what stays as bytes, so that they are one stream. element: bytes of what stays."""
        views = ((CODE_BYTES, self.codes), (SCALE_BYTES, self.scales), (element, self.kept))
        return {name: as_bytes_of(tensor, size) for size, view in views for name, tensor in view.items()}

    def bytes_member(self, member: Member, element: int) -> Member:
        """A member with its shards of `as_bytes`: codes in buffer 0, scales in buffer 1, then training's buffers."""
        codes, scales, kept = (members[0] for members in self.members([member]))
        held = [(CODE_BYTES, 0, slot) for slot in codes.held]
        held += [(SCALE_BYTES, 1, slot) for slot in scales.held]
        held += [(element, 2 + slot.buffer, slot) for slot in kept.held]
        slots = (
            replace(slot, buffer=buffer, offset=slot.offset * size, shard=bytes_shard(slot.shard, size))
            for size, buffer, slot in held
        )
        return replace(member, held=tuple(slots))

    def _scales_slot(self, slot: Slot) -> Slot:
        return replace(slot, name=slot.name + SCALES, shard=scales_shard(slot.shard, self.block))

    def _packed(self, member: Member, become: Callable[[Slot], Slot]) -> tuple[Slot, ...]:
        packed, end = [], 0
        for held in member.held:
            if held.name in self.codes:
                packed.append(replace(become(held), buffer=0, offset=end))
                end = aligned(packed[-1].stop)
        return tuple(packed)


def own_numel(member: Member) -> int:
    """Elements of the buffer in which a member keeps its own codes, or scales."""
    return aligned(member.held[-1].stop) if member.held else 0


def _as_it_is(slot: Slot) -> Slot:
    return slot


def as_bytes_of(tensor: LogicalTensor, size: int) -> LogicalTensor:
    """The bytes of a logical tensor whose elements have `size` bytes."""
    segments = tuple(segment._replace(shape=(*segment.shape, size)) for segment in tensor.segments)
    return replace(tensor, segments=segments)


def bytes_shard(shard: Shard, size: int) -> Shard:
    """The shard of the bytes next to a shard of the elements."""
    parts = (Part(part.segment, (*part.box, (0, size)), (*part.at, 0)) for part in shard.parts)
    return Shard((*shard.shape, size), tuple(parts))
