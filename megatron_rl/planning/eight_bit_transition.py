"""Bytes of a resharding whose linears cross as FP8 weights, and of what ranks hold of them while they generate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from megatron_rl.config.schema import RunConfig
from megatron_rl.hybrid_engine.eight_bit_members import CODE_BYTES, SCALE_BYTES, EightBitTensors
from megatron_rl.hybrid_engine.plan import ExchangePlan, Member, aligned, make_plan
from megatron_rl.model.families import VOCAB_PADDING, Model, ParamSpec, eight_bit_names, tensors_of
from megatron_rl.parallel.scale_blocks import SCALES
from megatron_rl.parallel.sharding import LogicalTensor, Place, shard_of
from megatron_rl.planning.representative_layers import RepresentativeLayers, packed_bytes

Members = Callable[[], Sequence[Member]]


class EightBitTransition:
    """The three exchanges of one group: of codes, of scales, and of what stays.

    specs: of the model. few, counts: those of one layer of each kind and stage, and how many layers each stands for.
    members, few_members: the group with all shards, and with those of `few`, in training's buffers. element: bytes.
    """

    def __init__(
        self,
        specs: Mapping[str, ParamSpec],
        members: Members,
        few: Mapping[str, ParamSpec],
        few_members: Members,
        counts: Mapping[str, int],
        block: int,
        element: int,
    ) -> None:
        self._whole = EightBitTensors.of(tensors_of(specs), eight_bit_names(specs), block)
        self._few = EightBitTensors.of(tensors_of(few), eight_bit_names(few), block)
        self._members, self._few_members = members, few_members
        self._counts = {**counts, **{name + SCALES: number for name, number in counts.items()}}
        self.sizes = (CODE_BYTES, SCALE_BYTES, element)
        """Bytes of an element of each exchange."""

    @cached_property
    def layers(self) -> list[RepresentativeLayers]:
        """Each exchange, planned for one layer of each kind and stage."""
        return [RepresentativeLayers(plan, self._counts) for plan in _plans(self._few, self._few_members())]

    @cached_property
    def exchanges(self) -> list[ExchangePlan]:
        """Each exchange, planned for all layers, as the hybrid engine does."""
        return _plans(self._whole, self._members())

    @cached_property
    def model_bytes(self) -> int:
        """Bytes of the whole model as generation reads it."""
        views = (self._whole.codes, self._whole.scales, self._whole.kept)
        return sum(
            size * sum(tensor.numel for tensor in view.values()) for size, view in zip(self.sizes, views, strict=True)
        )

    def received_bytes(self, number: int) -> int:
        """Return the bytes that a member receives."""
        return sum(size * layers.received_numel(number) for size, layers in zip(self.sizes, self.layers, strict=True))

    def network_bytes(self, number: int) -> int:
        """Return the bytes that a member receives from other nodes."""
        return sum(size * layers.network_numel(number) for size, layers in zip(self.sizes, self.layers, strict=True))

    def receive_buffers(self, number: int) -> list[int]:
        """Return the bytes of each of a member's three receive buffers."""
        pairs = zip(self.sizes, self.layers, strict=True)
        return [size * layers.receive_buffer_numel(number) for size, layers in pairs]

    def own_bytes(self, number: int) -> int:
        """Return the bytes of the codes and scales of a member's training shards."""
        return sum(
            size * sum(aligned(slot.shard.numel) * self._counts[slot.name] for slot in layers.plan.members[number].held)
            for size, layers in zip(self.sizes[:2], self.layers[:2], strict=True)
        )

    def scratch_bytes(self, number: int, bucket: int, num_messages: int) -> int:
        """Return the most bytes of packed messages in one of the exchanges. bucket: bytes of all messages together."""
        pairs = zip(self.sizes, self.exchanges, strict=True)
        return max(packed_bytes(exchange, number, bucket, num_messages, size) for size, exchange in pairs)


def product_numel(config: RunConfig, model: Model, tp_size: int) -> int:
    """Return the elements of the largest matrix that a product of the engine makes of its codes; 0 without codes."""
    if config.actor_rollout_ref.rollout.quantization is None:
        return 0
    place, names = Place(0, tp_size, VOCAB_PADDING, etp_size=tp_size), eight_bit_names(model.specs)
    tensors = [tensor for name, tensor in tensors_of(model.specs).items() if name in names]
    return max(math.prod(shard_of(tensor, place).shape[-2:]) for tensor in tensors)


def _plans(tensors: EightBitTensors, members: Sequence[Member]) -> list[ExchangePlan]:
    views: Sequence[Mapping[str, LogicalTensor]] = (tensors.codes, tensors.scales, tensors.kept)
    shares = [True] * len(members)
    return [
        make_plan(view, held, share_memory=shares) for view, held in zip(views, tensors.members(members), strict=True)
    ]
