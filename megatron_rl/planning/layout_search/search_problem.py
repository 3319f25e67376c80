"""The problem that `map` solves: roles with their models and passes, kept values, the cluster, and the load of a
step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_rl.config.keys import value_of
from megatron_rl.config.problems import divisors
from megatron_rl.config.roles import ACTOR, ROLLOUT, PassSpec, RoleSpec, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.model.families import Model
from megatron_rl.parallel.stages import StagePlan
from megatron_rl.planning.cache_rules import KVCacheSize
from megatron_rl.planning.engine_rules import engine_tp_sizes
from megatron_rl.planning.folder_checks import ModelSizes
from megatron_rl.planning.hardware import Hardware
from megatron_rl.planning.image_costs import ImageCosts
from megatron_rl.planning.layout_rules import rollout_misfits
from megatron_rl.planning.layout_search.grids import Grid, GridShape
from megatron_rl.planning.layout_sizes import Layout
from megatron_rl.planning.memory import engine_bytes
from megatron_rl.planning.memory_report import usable_bytes
from megatron_rl.planning.preflight import read_models
from megatron_rl.planning.role_ledger import RoleLedger
from megatron_rl.planning.role_params import RoleParams
from megatron_rl.planning.step_load import Load
from megatron_rl.planning.step_time import layout_of, scored_load, step_load, updated_load
from megatron_rl.planning.teaching_costs import TeachingCosts
from megatron_rl.planning.time import Estimator, ModelCost
from megatron_rl.planning.weights import ELEMENT_BYTES


@dataclass(frozen=True)
class Keeps:
    """Values of `--keep key=value`, which every choice of the search must have. values: dotted key -> value."""

    values: Mapping[str, Any]

    @classmethod
    def of(cls, config: RunConfig, keys: Iterable[str]) -> Keeps:
        """Take the values of these keys from `config`."""
        return cls({key: value_of(config, key) for key in keys})

    def allow(self, settings: Mapping[str, Any]) -> bool:
        """Return whether settings agree with every kept value whose key they contain."""
        if not self.values:
            return True
        return all(settings[key] == value for key, value in self.values.items() if key in settings)

    @cached_property
    def pools(self) -> dict[str, str]:
        """Key of a role -> the pool that it must be in."""
        return {key.removesuffix(".pool"): str(pool) for key, pool in self.values.items() if key.endswith(".pool")}


LEVELS = (
    (),
    ("grad_offload",),
    ("grad_offload", "optimizer_offload"),
    ("grad_offload", "optimizer_offload", "param_offload"),
)
"""Offload keys that are set together, from the cheapest combination on."""


@dataclass(frozen=True, eq=False)
class RoleWork:
    """One role on Megatron's grid, its model and its cost. element: bytes of a parameter. teaching: for or by it."""

    spec: RoleSpec
    sizes: ModelSizes
    cost: ModelCost
    element: int
    teaching: TeachingCosts

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def model(self) -> Model:
        """The model as its parts."""
        return self.sizes.parts

    @property
    def group(self) -> str:
        """Key of its layout settings."""
        return f"{self.spec.key}.megatron"

    def chunks(self, grid: Grid) -> tuple[tuple[int, ...], ...]:
        """Return the number of layers of each chunk of each stage on a grid."""
        return StagePlan.from_config(self.sizes.num_hidden_layers, grid.megatron).chunk_sizes

    @cached_property
    def kinds(self) -> list[str]:
        """Kinds of passes that it has."""
        return list(self.spec.phases)

    @cached_property
    def params(self) -> RoleParams:
        """The parameters of its model, and its adapters."""
        return RoleParams.of(self.spec, self.model)

    def ledger(self, config: RunConfig, grid: Grid, shape: GridShape) -> RoleLedger:
        """Return what the role holds and needs on a layout."""
        if grid not in self._specs:
            self._specs[grid] = replace(self.spec, megatron=replace(self.spec.megatron, **grid.settings))
        return RoleLedger(config, self._specs[grid], self.model, self.params, shape.num_ranks, self.teaching)

    @cached_property
    def _specs(self) -> dict[Grid, RoleSpec]:
        return {}

    @cached_property
    def offloads(self) -> dict[tuple[str, ...], dict[str, bool]]:
        """Level of `LEVELS` -> settings of this role."""
        is_held = self.spec.model_of is None or self.spec.lora.rank > 0
        allowed = self.spec.kind.offloads if is_held else ()
        return {
            level: {f"{self.group}.{key}": key in level and key in allowed for key in LEVELS[-1]} for level in LEVELS
        }


@dataclass(frozen=True)
class ClusterSize:
    """A number of equal machines with GPUs. A pool gets whole machines, or half of one."""

    num_nodes: int
    per_node: int

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.per_node

    @property
    def unit(self) -> int:
        """Ranks of the smallest pool; sizes of pools are counted in units of it."""
        return self.per_node // 2 if self.per_node % 2 == 0 else self.per_node

    @property
    def num_units(self) -> int:
        return self.num_ranks // self.unit

    @cached_property
    def sizes(self) -> list[int]:
        """Sizes in units that a pool can have."""
        step = self.per_node // self.unit
        return [1, *range(step, self.num_units + 1, step)] if step > 1 else list(range(1, self.num_units + 1))

    def shape(self, units: int) -> GridShape:
        """Return machines and ranks of each for a pool of `units` units."""
        ranks = units * self.unit
        return GridShape(1, ranks) if ranks < self.per_node else GridShape(ranks // self.per_node, self.per_node)


class SearchProblem:
    """A configuration of which everything but placement and layout is fixed, with costs that are computed once."""

    def __init__(
        self, config: RunConfig, hardware: Hardware, cluster: ClusterSize, lengths: tuple[float, float], keeps: Keeps
    ) -> None:
        """config: breaks no rule that is independent of placement. lengths: mean tokens of prompt and response."""
        self.config, self.hardware, self.cluster, self.lengths, self.keeps = config, hardware, cluster, lengths, keeps
        self.usable = usable_bytes(hardware)
        self.device = config.trainer.device
        sizes = {model.path: model for model in read_models(config, config_only=True)[0]}
        specs = list(roles_of(config))
        models = {path: model.parts for path, model in sizes.items()}
        self.roles = {
            spec.name: RoleWork(
                replace(spec, model_of=None) if spec.kind.initial_of else spec,  # `role_in` gives the other form
                sizes[spec.model_path],
                ModelCost.of(models[spec.model_path], spec.lora),
                ELEMENT_BYTES[spec.megatron.dtype],
                TeachingCosts.of(config, spec, models),
            )
            for spec in specs
            if not spec.kind.generates
        }
        self._caches: dict[int, KVCacheSize] = {}
        self.engines: dict[int, int] = {}
        """Rollout TP -> bytes of `engine_memory`."""
        self._least_generation: dict[int, float] = {}
        self._generation: dict[tuple[int, ...], float] = {}
        self.ways: dict[tuple[object, ...], list[Any]] = {}
        """Ways of passes that `RoleOnLayout` computed, for all clusters on which a rank has the same part."""
        self.bytes_of_passes: dict[tuple[object, ...], list[int]] = {}
        self._loads: dict[tuple[str, PassSpec, float | None, int], Load] = {}
        self.actor = self.roles[ACTOR]
        folder = Path(self.actor.sizes.path)
        self.images = ImageCosts.of(config, self.actor.model, self.actor.element, lengths[0], folder)
        self.rollout = next(spec for spec in specs if spec.kind.generates)

    @cached_property
    def _bases(self) -> dict[str, RoleWork]:
        """Roles on the ranks of the one that trains adapters and as which they started, with its model."""
        owners = {name: role.spec.kind.initial_of for name, role in self.roles.items()}
        return {
            name: replace(self.roles[name], spec=replace(self.roles[name].spec, model_of=owner))
            for name, owner in owners.items()
            if owner is not None and self.roles[owner].spec.lora.rank
        }

    def role_in(self, name: str, block: Sequence[str]) -> RoleWork:
        """Return a role in a pool of these roles, whose models one of them may hold for another."""
        base = self._bases.get(name)
        return base if base is not None and base.spec.model_of in block else self.roles[name]

    @cached_property
    def keeps_base(self) -> bool:
        """Whether the received part of the actor's base moves once, if there is one."""
        return self.actor.spec.lora.keeps_base

    @property
    def names(self) -> list[str]:
        """Names of all roles, in the order in which they are built."""
        return [*self.roles, ROLLOUT]

    @cached_property
    def load(self) -> Load:
        """Load of one step, with a cache that holds all sequences."""
        return step_load(self.config, 1 << 50, self.lengths)

    @cached_property
    def may_run_ahead(self) -> bool:
        """Whether generation may run asynchronously on ranks of its own: only if stale tokens are corrected."""
        config, correction = self.config, self.config.algorithm.rollout_correction
        corrects = correction.rollout_is or correction.rollout_rs or correction.bypass_mode
        is_often = config.async_training.trigger_parameter_sync_step <= 2
        return bool(corrects) and is_often and not config.algorithm.filter_groups.enable

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response together."""
        return self.config.longest_sequence

    def pass_load(self, role: RoleWork, pass_spec: PassSpec, recompute: float | None, cp: int = 1) -> Load:
        """Return the load of a pass. recompute: share of a forward pass that an update runs twice; None: a score.

        cp: ranks that share a sequence; 0: all samples of a rank are one micro-batch.
        """
        key = (role.name, pass_spec, recompute, cp)
        if key not in self._loads:
            if recompute is None:
                load = scored_load(self.load, pass_spec, self.config, max(cp, 1))
            else:
                spec = replace(role.spec, update=pass_spec)
                load = updated_load(self.load, spec, self.config, recompute, max(cp, 1))
                tower = self.images.flops_of_image if self.images and spec.trains_tower else (0.0, 0.0)
                load = replace(load, head_products=role.teaching.products, tower=tower)
            self._loads[key] = load if cp else replace(load, block_tokens=1 << 50)
        return self._loads[key]

    def times(self, role: RoleWork, kind: str) -> bool:
        """Return whether a step runs a pass of a role."""
        is_run: bool = getattr(role.spec, kind).is_run
        return is_run

    def estimator(self, role: RoleWork, grid: Grid, shape: GridShape) -> Estimator:
        """Return the time estimator of one role on one layout."""
        way = role.spec.megatron.override_transformer_config.cp_comm_type
        size = (shape.num_ranks, shape.per_node)
        layout = layout_of(grid.megatron, role.sizes.num_hidden_layers, size, grid.cp, way)
        return Estimator(role.cost, layout, self.hardware, role.spec.megatron.dtype)

    def generator(self, shape: GridShape, rollout_tp: int) -> Estimator:
        """Return the time estimator of generation."""
        layout = Layout(shape.num_ranks, shape.per_node, rollout_tp=rollout_tp, rollout_dp=attention_dp(self))
        return Estimator(self.actor.cost, layout, self.hardware, self.actor.spec.megatron.dtype)

    def cache(self, rollout_tp: int) -> KVCacheSize:
        """Return the KV cache of a rank of generation at a TP size."""
        if rollout_tp not in self._caches:
            self._caches[rollout_tp] = KVCacheSize.at(self.actor.sizes, rollout_tp, self.actor.element, self.device)
        return self._caches[rollout_tp]

    # Lower bounds of any layout: FLOPs at the rate of the clock, on ranks that never wait

    @cached_property
    def least_work(self) -> dict[str, tuple[float, float]]:
        """Role -> lower bound of rank-seconds of its scores and of its updates."""
        bounds = {}
        for role in self.roles.values():
            rate = self.hardware.flops(role.spec.megatron.dtype) * self.hardware.matmul_efficiency
            rate *= self.load.efficiency_share
            score = update = 0.0
            if role.spec.score is not None and self.times(role, "score"):
                load = scored_load(self.load, role.spec.score, self.config)
                score = role.cost.forward_flops(load.least_attended) * load.least_tokens / rate
            if role.spec.update is not None:
                load = updated_load(self.load, role.spec, self.config)
                update = role.cost.update_flops(load.least_attended) * load.least_tokens * load.epochs / rate
            bounds[role.name] = (score, update)
        return bounds

    def least_generation(self, units: int) -> float:
        """Return a lower bound of the seconds of generation: the best TP with a cache that holds all sequences."""
        if units not in self._least_generation:
            shape = self.cluster.shape(units)
            self._least_generation[units] = min(
                (self.generation(shape, tp, self.load.max_seqs) for tp in rollout_sizes(self, shape)),
                default=math.inf,
            )
        return self._least_generation[units]

    def generation(self, shape: GridShape, rollout_tp: int, max_seqs: int) -> float:
        """Return the seconds of generation where a replica decodes at most `max_seqs` sequences at once."""
        mine = -(-self.load.num_samples // (shape.num_ranks // rollout_tp))
        together = min(max_seqs, mine)
        # Only the samples of one replica decide, and how many ranks share a machine.
        key = (rollout_tp, mine, together, shape.per_node, min(shape.num_ranks, shape.per_node))
        if key not in self._generation:
            estimator = self.generator(shape, rollout_tp)
            self._generation[key] = estimator.generate(replace(self.load, max_seqs=together))
        return self._generation[key]

    def steady_generation(self, shape: GridShape, rollout_tp: int, max_seqs: int) -> float:
        """Return a lower bound of the seconds of a batch where the next batch fills free slots: all tokens at the best
        rate.
        """
        replicas = shape.num_ranks // rollout_tp
        together = min(2 * math.ceil(self.load.num_samples / replicas), max_seqs)
        seconds = self.generator(shape, rollout_tp).token_seconds(self.load, together)
        return self.load.num_samples / replicas * self.load.response * seconds / together


def attention_dp(work: SearchProblem) -> int:
    """Return the rollout TP groups that share experts: the configuration's number, whatever the layout."""
    return work.config.actor_rollout_ref.rollout.attention_dp_size


def engine_memory(work: SearchProblem, rollout_tp: int) -> int:
    """Return the bytes that an engine needs in addition to weights and cache."""
    if rollout_tp not in work.engines:
        needed = engine_bytes(work.config, work.actor.model, work.actor.element, rollout_tp, attention_dp(work))
        work.engines[rollout_tp] = needed
    return work.engines[rollout_tp]


def expert_cut(work: SearchProblem, rollout_tp: int) -> tuple[int, int]:
    """Return (EP, ETP) of the experts of generation at a TP size."""
    ep_size = work.config.actor_rollout_ref.rollout.ep_size_at(rollout_tp)
    return (1, rollout_tp) if ep_size == 1 else (ep_size, 1)


def rollout_sizes(work: SearchProblem, shape: GridShape) -> list[int]:
    """Return the TP sizes, inside of a node, at which these ranks can generate."""
    dp_size = attention_dp(work)
    if shape.num_ranks % dp_size:
        return []
    sizes = [size for size in divisors(shape.num_ranks // dp_size) if size <= shape.per_node]
    if dp_size > 1 and work.actor.sizes.shared_experts:
        sizes = [size for size in sizes if size == 1]
    sizes = [size for size in sizes if not rollout_misfits(work.actor.sizes, size, expert_cut(work, size)[0])]
    return engine_tp_sizes(work.device, sizes)
