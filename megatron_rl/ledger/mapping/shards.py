"""What a role holds on the ranks of a stage, in closed form: one layer's shards times the layers of the stage.

`ledger.planner.memory` lays out every buffer of every stage. Here the first, the second and the last stage stand for
all: of those between the second keeps the most activations. Padding is rounded up, so that this is never less.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.ledger.mapping.grids import Grid, GridShape
from megatron_rl.ledger.mapping.map_work import RoleWork
from megatron_rl.ledger.planner.memory import LargestGradients, trained_held
from megatron_rl.ledger.planner.weights import BUCKET_MULTIPLE, EMBEDDING, LAYER, is_tied
from megatron_rl.model.families import HEAD, VOCAB_PADDING
from megatron_rl.parallel.sharding import Place, shard_of, vocab_multiple

ALIGNMENT = 64
SLACK = 1.002
"""What buckets, foreign slots and rounding may take beyond the closed form."""


@dataclass(frozen=True)
class Counts:
    """Elements of one stage of TP x EP ranks. params: as many as there are; numel: with alignment."""

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
    """Bytes that a role holds for good on a rank of one stage."""

    params: int
    grads: int = 0
    moments: int = 0
    masters: int = 0
    share: int = 0
    """Elements of the optimizer's state."""

    @property
    def total(self) -> int:
        return self.params + self.grads + self.moments + self.masters


@dataclass(frozen=True)
class ModelShards:
    """One model cut by a grid: a layer, the embedding, and what is after the layers."""

    layer: Counts
    embedding: Counts
    tail: Counts
    head_numel: int
    gradients: LargestGradients
    is_tied: bool

    @classmethod
    def of(cls, role: RoleWork, tp: int, ep: int, expert_tp: int) -> ModelShards:
        """Of a role's model: one that ends in a value has no vocabulary in its tail."""
        specs = role.model.value_specs if role.spec.has_value_head else role.model.specs
        place = Place(0, tp, vocab_multiple(role.spec.megatron.make_vocab_size_divisible_by, tp), 0, ep, 0, expert_tp)
        layer, embedding, tail = list[tuple[int, bool]](), list[tuple[int, bool]](), list[tuple[int, bool]]()
        largest, head_numel = [0, 0], 0
        # Where some layers have experts, those without are smaller.
        with_experts = (LAYER.match(name) for name, spec in specs.items() if spec.tensor.is_expert)
        largest_layer = next((int(found[1]) for found in with_experts if found), 0)
        for name, spec in specs.items():
            found = LAYER.match(name)
            if found and int(found[1]) != largest_layer:
                continue
            numel, is_expert = shard_of(spec.tensor, place).numel, spec.tensor.is_expert
            (layer if found else embedding if name == EMBEDDING else tail).append((numel, is_expert))
            kind = 0 if found else 1
            largest[kind] = max(largest[kind], numel * (2 if is_expert else 1))
            if name == HEAD:
                head_numel = numel
        tied = HEAD in specs and is_tied(specs)
        gradients = LargestGradients(*(size * role.element for size in largest))
        return cls(_counts(layer), _counts(embedding), _counts(tail), head_numel, gradients, tied)


def _counts(tensors: list[tuple[int, bool]]) -> Counts:
    dense = [numel for numel, is_expert in tensors if not is_expert]
    experts = [numel for numel, is_expert in tensors if is_expert]
    aligned = [sum(-(-numel // ALIGNMENT) * ALIGNMENT for numel in group) for group in (dense, experts)]
    return Counts(sum(dense), aligned[0], sum(experts), aligned[1])


def looked_at(pp_size: int) -> list[int]:
    """The stages that stand for all."""
    return sorted({0, min(1, pp_size - 1), pp_size - 1})


def stage_counts(shards: ModelShards, role: RoleWork, grid: Grid) -> list[Counts]:
    """Of the stages that are looked at."""
    chunks, found = role.chunks(grid), []
    for pp_rank in looked_at(grid.pp):
        counts = shards.layer.times(sum(chunks[pp_rank]))
        if pp_rank == 0:
            counts += shards.embedding
        if pp_rank == grid.pp - 1:
            counts += shards.tail
            if shards.is_tied and grid.pp == 1:
                counts += Counts(-shards.head_numel, -shards.head_numel, 0, 0)
        found.append(counts)
    return found


def held(role: RoleWork, counts: list[Counts], grid: Grid, shape: GridShape, device: str) -> list[StageHeld]:
    """Bytes on the stages that are looked at."""
    if not role.spec.is_trained:
        return [StageHeld((one.dense_params + one.expert_params) * role.element) for one in counts]
    dp = shape.num_ranks // (grid.tp * grid.pp)
    expert_shares = shape.num_ranks // grid.pp // (grid.expert_tp * grid.ep)
    padding = (grid.vpp or 1) * BUCKET_MULTIPLE * max(dp, expert_shares)
    found = []
    for one in counts:
        numel = one.dense_numel + one.expert_numel + padding
        share = -(-one.dense_numel // dp) - (-one.expert_numel // expert_shares) + padding // dp
        bytes_of = trained_held(role.spec, numel, share, role.element, device)
        sizes = {name.removeprefix(f"{role.name} "): size for name, size in bytes_of.items()}
        found.append(
            StageHeld(sizes["parameters"], sizes["gradients"], sizes["moments"], sizes.get("masters", 0), share)
        )
    return found


@dataclass(frozen=True)
class ActorBytes:
    """The policy between pools and stages, in bytes. shard: what a rollout rank of `tp` holds; padding included."""

    model: int
    embedding: int
    layer: int
    tail: int

    @classmethod
    def of(cls, role: RoleWork) -> ActorBytes:
        """Without padding; a tied head is the embedding."""
        sizes = {"embedding": 0, "layer": 0, "tail": 0}
        tied = is_tied(role.model.specs)
        for name, spec in role.model.specs.items():
            found = LAYER.match(name)
            if (found and int(found[1])) or (tied and name == HEAD):
                continue
            kind = "layer" if found else "embedding" if name == EMBEDDING else "tail"
            sizes[kind] += spec.tensor.numel * role.element
        model = sizes["embedding"] + sizes["tail"] + sizes["layer"] * role.sizes.num_hidden_layers
        return cls(model, sizes["embedding"], sizes["layer"], sizes["tail"])

    def stage(self, role: RoleWork, grid: Grid, pp_rank: int) -> int:
        """Of a whole stage, over all of its TP ranks."""
        layers = sum(role.chunks(grid)[pp_rank])
        ends = (self.embedding if pp_rank == 0 else 0) + (self.tail if pp_rank == grid.pp - 1 else 0)
        return layers * self.layer + ends


def rollout_shard(role: RoleWork, tp: int) -> int:
    """Bytes that each rank of a rollout at TP `tp` holds of the policy, rows of padding included."""
    place, found = Place(0, tp, VOCAB_PADDING, 0, 1, 0, tp), 0
    tensors = {spec.tensor.name: (name, spec.tensor) for name, spec in role.model.specs.items()}
    for name, tensor in tensors.values():
        layer = LAYER.match(name)
        if layer and int(layer[1]):
            continue
        numel = -(-shard_of(tensor, place).numel // ALIGNMENT) * ALIGNMENT
        found += numel * (role.sizes.num_hidden_layers if layer else 1)
    return found * role.element
