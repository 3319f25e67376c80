"""Resharding traffic, estimated fast: plan one representative layer per kind and pipeline stage, and multiply by the
number of such layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.hybrid_engine.plan import ExchangePlan, aligned
from megatron_rl.hybrid_engine.schedule import most_packed
from megatron_rl.model.families import ParamSpec
from megatron_rl.parallel.stages import StagePlan
from megatron_rl.planning.weights import LAYER

Kind = tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
"""Names of a layer's parameters without its number, each with the shapes of its segments."""


@dataclass(frozen=True)
class RepresentativeLayers:
    """An exchange plan of few layers, of which each stands for all layers of its kind and pipeline stage.

    plan: of these layers, and of all tensors outside of layers. num_layers: tensor -> number of layers that it stands
    for. Pieces are planned tensor by tensor, so the counts are those of the whole model, to the element; its own plan
    would take seconds for a large model. A member is a rank of the exchange group, by its number there.
    """

    plan: ExchangePlan
    num_layers: Mapping[str, int]

    def received_numel(self, member: int) -> int:
        """Return the elements that a member receives."""
        return sum(piece.numel * self.num_layers[piece.name] for piece in self.plan.plans[member].received)

    def network_numel(self, member: int) -> int:
        """Return the elements that a member receives from other nodes."""
        members = self.plan.members
        node = members[member].node
        pieces = self.plan.plans[member].received
        return sum(piece.numel * self.num_layers[piece.name] for piece in pieces if members[piece.source].node != node)

    def receive_buffer_numel(self, member: int) -> int:
        """Return the elements of a member's receive buffer. Every slot but the last is followed by alignment."""
        slots = self.plan.plans[member].foreign
        if not slots:
            return 0
        total = sum(aligned(slot.shard.numel) * self.num_layers[slot.name] for slot in slots)
        return total - aligned(slots[-1].shard.numel) + slots[-1].shard.numel


@dataclass(frozen=True)
class InPlaceTransition:
    """Bytes of a resharding in place, of weights or adapters that generation reads in the dtype of training.

    element: bytes of one element. model_bytes: bytes of these weights in the whole model.
    """

    layers: RepresentativeLayers
    element: int
    model_bytes: int

    def received_bytes(self, member: int) -> int:
        """Return the bytes that a member of the exchange group receives."""
        return self.layers.received_numel(member) * self.element

    def network_bytes(self, member: int) -> int:
        """Return the bytes that a member receives from other nodes."""
        return self.layers.network_numel(member) * self.element


def one_layer_of_each(specs: Mapping[str, ParamSpec], stages: StagePlan) -> tuple[dict[str, ParamSpec], dict[str, int]]:
    """Return the parameters of representative layers, and tensor -> number of layers that it stands for.

    The first layer of each kind of a pipeline stage represents the others. Parameters outside of layers are all there,
    and stand for themselves.
    """
    kinds = kinds_of(specs)
    num_layers: dict[int, int] = {}  # representative layer -> layers of its kind and stage
    for pp_rank in range(stages.pp_size):
        of_kind: dict[Kind, list[int]] = {}
        for layer in sorted(layer for chunk in stages.layers(pp_rank) for layer in chunk):
            of_kind.setdefault(kinds.get(layer, ()), []).append(layer)
        num_layers |= {layers[0]: len(layers) for layers in of_kind.values()}
    kept, stands_for = {}, {}
    for name, spec in specs.items():
        match = LAYER.match(name)
        if match is None or int(match[1]) in num_layers:
            kept[name] = spec
            stands_for[spec.tensor.name] = 1 if match is None else num_layers[int(match[1])]
    return kept, stands_for


def kinds_of(specs: Mapping[str, ParamSpec]) -> dict[int, Kind]:
    """Return layer -> its kind. Layers of one kind have parameters of the same names and sizes, adapters included."""
    kinds: dict[int, list[tuple[str, tuple[tuple[int, ...], ...]]]] = {}
    for name, spec in specs.items():
        if layer := LAYER.match(name):
            sizes = tuple(segment.shape for segment in spec.tensor.segments)
            kinds.setdefault(int(layer[1]), []).append((name[layer.end() :], sizes))
    return {layer: tuple(own) for layer, own in kinds.items()}


def packed_bytes(exchange: ExchangePlan, member: int, bucket: int, num_messages: int, element: int) -> int:
    """Return the most bytes of a member's packed messages in flight.

    bucket: bytes that all `num_messages` messages may have together. element: bytes of one element.
    """
    return num_messages * most_packed(exchange, member, max(1, bucket // element // num_messages)) * element
