"""Resharding traffic, estimated fast: plan one layer of each kind and pipeline stage, multiply by the number of them.

Messages are estimated from the same plan.
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
    """An exchange plan of one layer of each kind and stage, which stands for all layers of that kind and stage.

    A plan of every tensor of a large model takes seconds. Pieces are planned tensor by tensor, so those of one layer
    times the number of layers equal those of all layers, to the byte.
    plan: also holds all tensors that belong to no layer. counts: tensor -> how many layers it stands for.
    """

    plan: ExchangePlan
    counts: Mapping[str, int]

    def over_network(self, number: int) -> int:
        """Return the elements that a member receives from other nodes."""
        members = self.plan.members
        node = members[number].node
        pieces = self.plan.plans[number].received
        return sum(piece.numel * self.counts[piece.name] for piece in pieces if members[piece.source].node != node)

    def received(self, number: int) -> int:
        """Return the elements that a member receives."""
        return sum(piece.numel * self.counts[piece.name] for piece in self.plan.plans[number].received)

    def foreign_numel(self, number: int) -> int:
        """Return the elements of a member's receive buffer, alignment included; nothing follows the last slot."""
        slots = self.plan.plans[number].foreign
        if not slots:
            return 0
        total = sum(aligned(slot.shard.numel) * self.counts[slot.name] for slot in slots)
        return total - aligned(slots[-1].shard.numel) + slots[-1].shard.numel


@dataclass(frozen=True)
class InPlaceTransition:
    """Bytes of a resharding in place, of weights, or adapters, that are served as they are trained.

    element: bytes of one. model_bytes: of all of them in the whole model.
    """

    layers: RepresentativeLayers
    element: int
    model_bytes: int

    def received_bytes(self, number: int) -> int:
        """Return the bytes that a member of the exchange group receives."""
        return self.layers.received(number) * self.element

    def network_bytes(self, number: int) -> int:
        """Return the bytes that a member receives from other nodes."""
        return self.layers.over_network(number) * self.element


def one_layer_of_each(specs: Mapping[str, ParamSpec], stages: StagePlan) -> tuple[dict[str, ParamSpec], dict[str, int]]:
    """Return the parameters outside of layers and of the first layer of every kind of every stage, and how many layers
    of that kind and stage each tensor stands for. Kinds: with experts, without; with these or those adapters or sizes.
    """
    kinds = kinds_of(specs)
    first: dict[int, int] = {}
    for rank in range(stages.pp_size):
        here: dict[Kind, list[int]] = {}
        for layer in sorted(layer for chunk in stages.layers(rank) for layer in chunk):
            here.setdefault(kinds.get(layer, ()), []).append(layer)
        first |= {layers[0]: len(layers) for layers in here.values()}
    kept, counts = {}, {}
    for name, spec in specs.items():
        match = LAYER.match(name)
        if match is None or int(match[1]) in first:
            kept[name] = spec
            counts[spec.tensor.name] = 1 if match is None else first[int(match[1])]
    return kept, counts


def kinds_of(specs: Mapping[str, ParamSpec]) -> dict[int, Kind]:
    """Return layer -> its kind: layers of equal kinds have parameters of equal names and sizes."""
    kinds: dict[int, list[tuple[str, tuple[tuple[int, ...], ...]]]] = {}
    for name, spec in specs.items():
        if layer := LAYER.match(name):
            sizes = tuple(segment.shape for segment in spec.tensor.segments)
            kinds.setdefault(int(layer[1]), []).append((name[layer.end() :], sizes))
    return {layer: tuple(own) for layer, own in kinds.items()}


def packed_bytes(exchange: ExchangePlan, number: int, bucket: int, num_messages: int, element: int) -> int:
    """Return the most bytes of a member's packed messages under way. bucket: bytes of all messages together."""
    return num_messages * most_packed(exchange, number, max(1, bucket // element // num_messages)) * element
