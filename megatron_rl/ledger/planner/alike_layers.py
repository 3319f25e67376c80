"""The exchange plan of one layer of each kind and stage, counted for all: such layers lie and travel alike.

A plan of every tensor of a large model takes seconds; pieces are planned tensor by tensor, so that those of one layer
times the layers of its stage are those of all, to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.hybrid_engine.plan import ALIGNMENT, ExchangePlan
from megatron_rl.ledger.planner.weights import LAYER
from megatron_rl.model.families import ParamSpec
from megatron_rl.parallel.stages import StagePlan


@dataclass(frozen=True)
class AlikeLayers:
    """plan: of one layer of each kind and stage, and of all that is no layer's. counts: tensor -> how many."""

    plan: ExchangePlan
    counts: Mapping[str, int]

    def over_network(self, number: int) -> int:
        """Elements that a member receives from other nodes."""
        members = self.plan.members
        node = members[number].node
        pieces = self.plan.plans[number].received
        return sum(piece.numel * self.counts[piece.name] for piece in pieces if members[piece.source].node != node)

    def received(self, number: int) -> int:
        """Elements that a member receives."""
        return sum(piece.numel * self.counts[piece.name] for piece in self.plan.plans[number].received)

    def foreign_numel(self, number: int) -> int:
        """Of a member's foreign buffer, alignment included; nothing follows the last slot."""
        slots = self.plan.plans[number].foreign
        if not slots:
            return 0
        aligned = sum(_aligned(slot.shard.numel) * self.counts[slot.name] for slot in slots)
        return aligned - _aligned(slots[-1].shard.numel) + slots[-1].shard.numel


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def one_layer_of_each(specs: Mapping[str, ParamSpec], stages: StagePlan) -> tuple[dict[str, ParamSpec], dict[str, int]]:
    """The parameters of no layer, and of the first layer of every kind of every stage: with experts, or without.

    And how many of each tensor there are.
    """
    kinds = kinds_of(specs)
    first: dict[int, int] = {}
    for rank in range(stages.pp_size):
        here: dict[tuple[str, ...], list[int]] = {}
        for layer in sorted(layer for chunk in stages.layers(rank) for layer in chunk):
            here.setdefault(kinds[layer], []).append(layer)
        first |= {layers[0]: len(layers) for layers in here.values()}
    kept, counts = {}, {}
    for name, spec in specs.items():
        found = LAYER.match(name)
        if found is None or int(found[1]) in first:
            kept[name] = spec
            counts[spec.tensor.name] = 1 if found is None else first[int(found[1])]
    return kept, counts


def kinds_of(specs: Mapping[str, ParamSpec]) -> dict[int, tuple[str, ...]]:
    """Layer -> the names of its parameters without its number: layers with the same ones are of one kind."""
    names: dict[int, list[str]] = {}
    for name in specs:
        if found := LAYER.match(name):
            names.setdefault(int(found[1]), []).append(name[found.end() :])
    return {layer: tuple(own) for layer, own in names.items()}
