"""Seconds before generation as the search of `map` judges them: passes over images, and closed forms of a resharding.

in place       a rank receives M / t_g less what it holds; bytes that its node does not have cross the network once
               for the node's ranks that need the same, and are passed on inside
between pools  a rollout rank receives M / t_g; training sends each stage once, spread over the stage's ranks

A placement that `map` offers is counted again by the exchange plan itself.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from megatron_rl.config.roles import Placement
from megatron_rl.model.families import VOCAB_PADDING, tensors_of
from megatron_rl.model.families.adapter_params import adapter_specs
from megatron_rl.parallel.rank_grid import rollout_place
from megatron_rl.parallel.sharding import shard_of
from megatron_rl.planning.image_costs import readers
from megatron_rl.planning.layout_search.grids import Grid, GridShape
from megatron_rl.planning.layout_search.role_on_layout import sampled_stages
from megatron_rl.planning.layout_search.search_problem import RoleWork, SearchProblem
from megatron_rl.planning.step_time import dispatch_seconds
from megatron_rl.planning.time import LINK_EFFICIENCY
from megatron_rl.planning.weights import EMBEDDING, LAYER, aligned


@dataclass(frozen=True)
class ActorBytes:
    """Bytes of the policy, or of its adapters: all, the embedding, one layer, and the parameters after the layers."""

    model: int
    embedding: int
    layer: int
    tail: int

    @classmethod
    def of(cls, role: RoleWork) -> ActorBytes:
        """Count without padding; a tied head is the embedding. A layer is the mean of all."""
        specs, element = role.model.specs, role.element
        in_layers = sum(spec.tensor.numel for name, spec in specs.items() if LAYER.match(name)) * element
        model, embedding = role.model.num_params * element, specs[EMBEDDING].tensor.numel * element
        return cls(model, embedding, in_layers // role.sizes.num_hidden_layers, model - embedding - in_layers)

    @classmethod
    def of_adapters(cls, role: RoleWork) -> ActorBytes:
        """Count the adapters that generation reads; 0 without, and where they are merged."""
        size = role.cost.adapter_params * role.element if role.spec.lora.crosses_alone else 0
        return cls(size, 0, size // role.sizes.num_hidden_layers, 0)

    def plus(self, other: ActorBytes) -> ActorBytes:
        """Return both together."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return ActorBytes(*map(sum, pairs))

    def stage(self, role: RoleWork, grid: Grid, pp_rank: int) -> int:
        """Return the bytes of a whole stage, over all of its TP ranks."""
        layers = sum(role.chunks(grid)[pp_rank])
        ends = (self.embedding if pp_rank == 0 else 0) + (self.tail if pp_rank == grid.pp - 1 else 0)
        return layers * self.layer + ends


def rollout_shard(role: RoleWork, tp: int, ep: int = 1, *, adapters: bool = False) -> int:
    """Return the bytes of the policy on each rank of a rollout at these TP and EP, rows of padding included.

    adapters: those of its adapters alone, if generation reads any.
    """
    if adapters and not role.spec.lora.crosses_alone:
        return 0
    place = rollout_place(0, tp, ep, VOCAB_PADDING)
    whole = adapter_specs(role.model.specs, role.spec.lora) if adapters else role.model.specs
    return sum(aligned(shard_of(tensor, place).numel) for tensor in tensors_of(whole).values()) * role.element


def in_place_seconds(work: SearchProblem, actor: ActorBytes, grid: Grid, shape: GridShape, rollout_tp: int) -> float:
    """Return the seconds of the rank that lacks most: one of a middle stage, as the ends hold a vocabulary matrix."""
    stage_size = shape.num_ranks // grid.pp
    together = math.lcm(grid.tp, rollout_tp) // rollout_tp
    own = actor.stage(work.actor, grid, min(1, grid.pp - 1))
    lacking = actor.model / rollout_tp - (own / grid.tp if rollout_tp <= grid.tp else 0.0)
    on_node = max(1, min(grid.pp, shape.per_node // stage_size))
    # Stages of a node need different shards where a rollout TP group spans them.
    different = min(on_node, rollout_tp // math.gcd(rollout_tp, stage_size))
    shared = together * on_node / different
    beyond = actor.model - own * on_node if on_node < grid.pp else 0.0
    far = max(0.0, beyond / rollout_tp / shared)
    near = max(0.0, lacking - far)
    gpu = work.hardware
    return (far / gpu.network_bandwidth + near / gpu.link_bandwidth) / LINK_EFFICIENCY


def received_seconds(work: SearchProblem, shard: int) -> float:
    """Return the seconds of a rollout rank of a separate pool."""
    return shard / work.hardware.network_bandwidth / LINK_EFFICIENCY


def sent_seconds(work: SearchProblem, actor: ActorBytes, grid: Grid, shape: GridShape) -> float:
    """Return the seconds of a training rank that sends to a separate pool."""
    stages = (actor.stage(work.actor, grid, pp_rank) for pp_rank in sampled_stages(grid.pp))
    return max(stages) / (shape.num_ranks // grid.pp) / work.hardware.network_bandwidth / LINK_EFFICIENCY


def image_seconds(work: SearchProblem, grid: Grid, shape: GridShape) -> float:
    """Return the seconds of the tower's passes and their calls, where the actor has this layout; 0 without images."""
    if work.images is None:
        return 0.0
    estimator = work.estimator(work.actor, grid, shape)
    towers = Placement.of(work.config).num_towers
    busy = work.images.read(estimator.layout, work.hardware, estimator.dtype, towers)
    calls = towers * work.images.rounds(readers(estimator.layout))
    return estimator.seconds(busy) + calls * dispatch_seconds(shape.num_nodes, shape.per_node, work.hardware)
