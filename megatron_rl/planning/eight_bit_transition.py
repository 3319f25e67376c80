"""Bytes of a resharding whose linears cross as FP8 weights, and of what ranks hold of them while they generate."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from functools import cached_property

from megatron_rl.config.schema import RunConfig
from megatron_rl.hybrid_engine.eight_bit_members import CODE_BYTES, SCALE_BYTES, EightBitTensors
from megatron_rl.hybrid_engine.plan import Member, aligned
from megatron_rl.model.families import VOCAB_PADDING, Model, ParamSpec, eight_bit_names, tensors_of
from megatron_rl.parallel.rank_grid import rollout_place
from megatron_rl.parallel.sharding import LogicalTensor, shard_of
from megatron_rl.planning.exchange_counts import ExchangeCounts, packed_bytes


class EightBitTransition:
    """The three exchanges of one group: of codes, of scales, and of what stays.

    specs: parameters of the model. members: the group with its shards in training's buffers. element: bytes of a
    plain weight.
    """

    def __init__(self, specs: Mapping[str, ParamSpec], members: Sequence[Member], block: int, element: int) -> None:
        self._whole = EightBitTensors.of(tensors_of(specs), eight_bit_names(specs), block)
        self._members = members
        self.sizes = (CODE_BYTES, SCALE_BYTES, element)
        """Bytes of an element of each exchange."""

    @property
    def _views(self) -> tuple[Mapping[str, LogicalTensor], ...]:
        return self._whole.codes, self._whole.scales, self._whole.kept

    @cached_property
    def moved(self) -> list[tuple[int, ExchangeCounts]]:
        """Each exchange, after the bytes of its elements."""
        held = self._whole.members(self._members)
        counts = [ExchangeCounts(view, members) for view, members in zip(self._views, held, strict=True)]
        return list(zip(self.sizes, counts, strict=True))

    @cached_property
    def model_bytes(self) -> int:
        """Bytes of the whole model as generation reads it."""
        return sum(
            size * sum(tensor.numel for tensor in view.values())
            for size, view in zip(self.sizes, self._views, strict=True)
        )

    def receive_buffers(self, number: int) -> list[int]:
        """Return the bytes of each of a member's three receive buffers."""
        return [size * counts.receive_buffer_numels[number] for size, counts in self.moved]

    @cached_property
    def own_bytes(self) -> list[int]:
        """Bytes of the codes and scales of each member's training shards."""
        of_codes, of_scales = (
            [size * self._own_numel(member) for member in counts.members] for size, counts in self.moved[:2]
        )
        return list(map(operator.add, of_codes, of_scales))

    @staticmethod
    def _own_numel(member: Member) -> int:
        return sum(aligned(slot.shard.numel) for slot in member.held)

    def scratch_bytes(self, number: int, bucket: int, num_messages: int) -> int:
        """Return the most bytes of packed messages in one of the exchanges. bucket: bytes of all messages together."""
        return max(packed_bytes(counts, number, bucket, num_messages, size) for size, counts in self.moved)


def product_numel(config: RunConfig, model: Model, tp_size: int) -> int:
    """Return the elements of the largest matrix that a product of the engine makes of its codes; 0 without codes."""
    if config.actor_rollout_ref.rollout.quantization is None:
        return 0
    ep_size = config.actor_rollout_ref.rollout.ep_size_at(tp_size)
    place, names = rollout_place(0, tp_size, ep_size, VOCAB_PADDING), eight_bit_names(model.specs)
    tensors = [tensor for name, tensor in tensors_of(model.specs).items() if name in names]
    return max(math.prod(shard_of(tensor, place).shape[-2:]) for tensor in tensors)
