"""The exchange plan of one layer of each stage, counted for all: layers of a stage lie and travel alike.

A plan of every tensor of a large model takes seconds; pieces are planned tensor by tensor, so that those of one layer
times the layers of its stage are those of all, to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_rl.hybrid_engine.plan import ALIGNMENT, ExchangePlan
from megatron_rl.model.families import ParamSpec
from megatron_rl.parallel.stages import StagePlan
from megatron_rl.planner.weights import LAYER


@dataclass(frozen=True)
class AlikeLayers:
    """plan: of the tensors of one layer of each stage, and of all that is no layer's. counts: tensor -> how many."""

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
    """The parameters of the first layer of every stage and of no layer, and how many of each tensor there are."""
    kept, counts = {}, {}
    first = {min(map(min, stages.layers(rank))): sum(map(len, stages.layers(rank))) for rank in range(stages.pp_size)}
    for name, spec in specs.items():
        layer = LAYER.match(name)
        if layer is None or int(layer[1]) in first:
            kept[name] = spec
            counts[spec.tensor.name] = 1 if layer is None else first[int(layer[1])]
    return kept, counts
