"""Closed forms of `map`: bytes that a role holds on a stage, and seconds of a transition.

A stage holds one layer's shards times its layers. `ledger.planner.memory` lays out every buffer of every stage. Here
the first, the second and the last stage stand for all: of those between, the second keeps the most activations.
Padding is rounded up, so that the closed form is never less. A placement that `map` offers is counted again by the
exchange plan itself.

in place       a rank receives M / t_g less what it holds; bytes that its node lacks cross the network once for the
               node's ranks that need the same, and are passed on inside
between pools  a rollout rank receives M / t_g; training sends each stage once, spread over the stage's ranks
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_rl.ledger.mapping.grids import Grid, GridShape
from megatron_rl.ledger.mapping.map_work import MapWork, RoleWork
from megatron_rl.ledger.planner.memory import LargestGradients, trained_held
from megatron_rl.ledger.planner.run_models import one_layer_of_each
from megatron_rl.ledger.planner.time import LINK_EFFICIENCY
from megatron_rl.ledger.planner.weights import BUCKET_MULTIPLE, EMBEDDING, LAYER, aligned, is_tied
from megatron_rl.model.families import HEAD, VOCAB_PADDING, tensors_of
from megatron_rl.parallel.sharding import Place, shard_of, vocab_multiple
from megatron_rl.parallel.stages import StagePlan

SLACK = 1.002
"""Factor for what buckets, foreign slots and rounding may take beyond the closed form."""


@dataclass(frozen=True)
class Counts:
    """Elements on one rank of a stage. params: without alignment; numel: with it."""

    dense_params: int
    dense_numel: int
    expert_params: int
    expert_numel: int

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.dense_params + other.dense_params,
            self.dense_numel + other.dense_numel,
            self.expert_params + other.expert_params,
            self.expert_numel + other.expert_numel,
        )

    def times(self, number: int) -> Counts:
        return Counts(*(number * size for size in vars(self).values()))


@dataclass(frozen=True)
class StageHeld:
    """Bytes that a role holds permanently on a rank of one stage. share: elements whose optimizer state it keeps."""

    params: int
    grads: int = 0
    moments: int = 0
    masters: int = 0
    share: int = 0

    @property
    def total(self) -> int:
        return self.params + self.grads + self.moments + self.masters


@dataclass(frozen=True)
class ModelShards:
    """One model sharded by a grid: a layer, the embedding, and the parameters after the layers."""

    layer: Counts
    embedding: Counts
    tail: Counts
    head_numel: int
    gradients: LargestGradients
    is_tied: bool

    @classmethod
    def of(cls, role: RoleWork, tp: int, ep: int, expert_tp: int) -> ModelShards:
        """Shard a role's model. A value model has no vocabulary matrix in its tail."""
        specs = role.model.value_specs if role.spec.has_value_head else role.model.specs
        place = Place(0, tp, vocab_multiple(role.spec.megatron.make_vocab_size_divisible_by, tp), 0, ep, 0, expert_tp)
        layer, embedding, tail = list[tuple[int, bool]](), list[tuple[int, bool]](), list[tuple[int, bool]]()
        largest, head_numel = [0, 0], 0
        # Where some layers have experts, those without are smaller.
        with_experts = (LAYER.match(name) for name, spec in specs.items() if spec.tensor.is_expert)
        largest_layer = next((int(match[1]) for match in with_experts if match), 0)
        for name, spec in specs.items():
            match = LAYER.match(name)
            if match and int(match[1]) != largest_layer:
                continue
            numel, is_expert = shard_of(spec.tensor, place).numel, spec.tensor.is_expert
            (layer if match else embedding if name == EMBEDDING else tail).append((numel, is_expert))
            kind = 0 if match else 1
            largest[kind] = max(largest[kind], numel * (2 if is_expert else 1))
            if name == HEAD:
                head_numel = numel
        tied = HEAD in specs and is_tied(specs)
        gradients = LargestGradients(*(size * role.element for size in largest))
        return cls(_counts(layer), _counts(embedding), _counts(tail), head_numel, gradients, tied)


def _counts(tensors: list[tuple[int, bool]]) -> Counts:
    dense = [numel for numel, is_expert in tensors if not is_expert]
    experts = [numel for numel, is_expert in tensors if is_expert]
    return Counts(sum(dense), sum(map(aligned, dense)), sum(experts), sum(map(aligned, experts)))


def sampled_stages(pp_size: int) -> list[int]:
    """Return the pipeline stages that stand for all."""
    return sorted({0, min(1, pp_size - 1), pp_size - 1})


def stage_counts(shards: ModelShards, role: RoleWork, grid: Grid) -> list[Counts]:
    """Return the elements on each sampled stage."""
    chunks, stages = role.chunks(grid), []
    for pp_rank in sampled_stages(grid.pp):
        counts = shards.layer.times(sum(chunks[pp_rank]))
        if pp_rank == 0:
            counts += shards.embedding
        if pp_rank == grid.pp - 1:
            counts += shards.tail
            if shards.is_tied and grid.pp == 1:
                counts += Counts(-shards.head_numel, -shards.head_numel, 0, 0)
        stages.append(counts)
    return stages


def held(role: RoleWork, counts: list[Counts], grid: Grid, shape: GridShape, device: str) -> list[StageHeld]:
    """Return the permanent bytes on each sampled stage."""
    if not role.spec.is_trained:
        return [StageHeld((count.dense_params + count.expert_params) * role.element) for count in counts]
    dp = shape.num_ranks // (grid.tp * grid.pp)
    expert_shares = shape.num_ranks // grid.pp // (grid.expert_tp * grid.ep)
    padding = (grid.vpp or 1) * BUCKET_MULTIPLE * max(dp, expert_shares)
    stages = []
    for count in counts:
        numel = count.dense_numel + count.expert_numel + padding
        share = -(-count.dense_numel // dp) - (-count.expert_numel // expert_shares) + padding // dp
        bytes_of = trained_held(role.spec, numel, share, role.element, device)
        sizes = {name.removeprefix(f"{role.name} "): size for name, size in bytes_of.items()}
        stages.append(
            StageHeld(sizes["parameters"], sizes["gradients"], sizes["moments"], sizes.get("masters", 0), share)
        )
    return stages


@dataclass(frozen=True)
class ActorBytes:
    """Bytes of the policy: of the whole model, the embedding, one layer, and the parameters after the layers."""

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

    def stage(self, role: RoleWork, grid: Grid, pp_rank: int) -> int:
        """Return the bytes of a whole stage, over all of its TP ranks."""
        layers = sum(role.chunks(grid)[pp_rank])
        ends = (self.embedding if pp_rank == 0 else 0) + (self.tail if pp_rank == grid.pp - 1 else 0)
        return layers * self.layer + ends


def rollout_shard(role: RoleWork, tp: int) -> int:
    """Return the bytes of the policy on each rank of a rollout at TP `tp`, rows of padding included."""
    place = Place(0, tp, VOCAB_PADDING, 0, 1, 0, tp)
    specs, counts = one_layer_of_each(role.model.specs, StagePlan(role.sizes.num_hidden_layers, 1))
    numels = {name: aligned(shard_of(tensor, place).numel) for name, tensor in tensors_of(specs).items()}
    return sum(numel * counts[name] for name, numel in numels.items()) * role.element


def in_place_seconds(work: MapWork, actor: ActorBytes, grid: Grid, shape: GridShape, rollout_tp: int) -> float:
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


def received_seconds(work: MapWork, shard: int) -> float:
    """Return the seconds of a rollout rank of a separate pool."""
    return shard / work.hardware.network_bandwidth / LINK_EFFICIENCY


def sent_seconds(work: MapWork, actor: ActorBytes, grid: Grid, shape: GridShape) -> float:
    """Return the seconds of a training rank that sends to a separate pool."""
    stages = (actor.stage(work.actor, grid, pp_rank) for pp_rank in sampled_stages(grid.pp))
    return max(stages) / (shape.num_ranks // grid.pp) / work.hardware.network_bandwidth / LINK_EFFICIENCY
