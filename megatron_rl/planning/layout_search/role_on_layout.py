"""Options of a role's passes on one layout: micro-batches and recomputed layers, with seconds and bytes of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from megatron_rl.config.megatron import MegatronConfig, OverrideTransformerConfig
from megatron_rl.config.roles import PassSpec
from megatron_rl.planning.activations import Recompute
from megatron_rl.planning.layout_search.grids import Grid, GridShape
from megatron_rl.planning.layout_search.search_problem import RoleWork, SearchProblem
from megatron_rl.planning.role_ledger import SCORE, UPDATE, Passes, RoleLedger
from megatron_rl.planning.step_load import Load
from megatron_rl.planning.step_time import dispatch_seconds
from megatron_rl.planning.time import Busy, Estimator

MULTIPLES = (1, 2, 4, 8, 16, 32)
"""Numbers of samples of the longest length in a micro-batch that are tried."""
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run one pass of a role on one layout.

    kind: score or update. recompute: None for a score; again: its recomputed layers. work: rank-seconds of all ranks
    where they share cores, else 0.
    """

    kind: str
    pass_spec: PassSpec
    passes: Passes
    recompute: OverrideTransformerConfig | None
    again: Recompute | None
    seconds: float
    settings: dict[str, Any] = field(compare=False)
    work: float = 0.0


class TimedPass(NamedTuple):
    """One way to run a pass on all clusters on which a rank has the same part of the samples.

    again: what `recompute` recomputes; None: a score. busy: the forward passes, or all passes of an optimizer step.
    """

    pass_spec: PassSpec
    passes: Passes
    recompute: OverrideTransformerConfig | None
    again: Recompute | None
    settings: dict[str, Any]
    load: Load
    busy: Busy


class RoleOnLayout:
    """One role on one layout of a pool: the bytes it holds, and the options of its passes."""

    def __init__(self, work: SearchProblem, role: RoleWork, grid: Grid, shape: GridShape) -> None:
        self.work, self.role, self.grid, self.shape = work, role, grid, shape
        self.call_seconds = dispatch_seconds(shape.num_nodes, shape.per_node, work.hardware)
        self.ledger = role.ledger(work.config, grid, shape)
        self.stages = sampled_stages(grid.pp)
        self.held = [self.ledger.held(pp_rank) for pp_rank in self.stages]
        self._least_cut: dict[tuple[str, int], float] = {}

    @property
    def kinds(self) -> list[str]:
        """Kinds of passes that the role has."""
        return self.role.kinds

    def first_fit(self, kind: str, room: list[int]) -> Option | None:
        """Return the fastest option that fits on every stage. room: free bytes of each sampled stage."""
        for option in self.options[kind]:
            if all(size <= free for size, free in zip(self.bytes_of(option), room, strict=True)):
                return option
        return None

    @cached_property
    def options(self) -> dict[str, list[Option]]:
        """Kind of pass -> all of its options, the fastest first."""
        # Of equally fast options the largest micro-batch comes first: fewer passes are never slower.
        return {kind: sorted(self._of_kind(kind), key=_order) for kind in self.kinds}

    def _of_kind(self, kind: str) -> Iterator[Option]:
        work, role = self.work, self.role
        estimator = work.estimator(role, self.grid, self.shape)
        step = None if kind == SCORE else estimator.optimizer_step(work.load.overlaps_dp)
        for way in self._ways(kind, estimator):
            if step is None:
                seconds = estimator.seconds(way.busy) + self.call_seconds if work.times(role, kind) else 0.0
                yield Option(kind, way.pass_spec, way.passes, None, None, seconds, way.settings)
                continue
            busy = (way.busy + step).times(way.load.num_updates)
            seconds = estimator.seconds(busy) + way.load.num_updates * self.call_seconds
            rank_seconds = busy.work * self.shape.num_ranks if work.hardware.parallel_ranks else 0.0
            yield Option(kind, way.pass_spec, way.passes, way.recompute, way.again, seconds, way.settings, rank_seconds)

    def _ways(self, kind: str, estimator: Estimator) -> list[TimedPass]:
        """Return the ways of a pass. Only a rank's part decides them: most sizes share those of others."""
        work, role, grid = self.work, self.role, self.grid
        configured: PassSpec = getattr(role.spec, kind)
        load = work.pass_load(role, configured, None if kind == SCORE else 0.0, grid.cp)
        key = (id(role), kind, grid, estimator.part_of(load), parts_of(self.ledger, kind))
        if key not in work.ways:
            work.ways[key] = list(self._made(kind, configured, estimator))
        return work.ways[key]

    def _made(self, kind: str, configured: PassSpec, estimator: Estimator) -> Iterator[TimedPass]:
        work, role = self.work, self.role
        again = [(each, self._of(each), settings) for each, settings in (self._recomputes if kind == UPDATE else [])]
        shares = [self.ledger.recomputed_share(recompute) for _, recompute, _ in again]
        for pass_spec, passes, cut in self._cuts(kind, configured):
            if not work.keeps.allow(cut):
                continue
            if kind == SCORE:
                load = work.pass_load(role, pass_spec, None, self.grid.cp)
                busy = estimator.scored(load) if work.times(role, kind) else Busy(0.0, 0.0)
                yield TimedPass(pass_spec, passes, None, None, cut, load, busy)
                continue
            for (recompute, parts, settings), share in zip(again, shares, strict=True):
                load = work.pass_load(role, pass_spec, share, self.grid.cp)
                yield TimedPass(pass_spec, passes, recompute, parts, cut | settings, load, estimator.passed(load))

    def _cuts(self, kind: str, pass_spec: PassSpec) -> Iterator[tuple[PassSpec, Passes, dict[str, Any]]]:
        """Yield the pass with other micro-batches and their settings; none larger than all samples of a rank."""
        work, cp = self.work, self.grid.cp
        longest = (work.longest if pass_spec.longest is None else pass_spec.longest) + pass_spec.extra_tokens
        if cp > 1:  # a rank's part of a sequence that is filled up to equal chunks
            longest = 2 * -(-longest // (2 * cp))
        seen = set()
        limit = pass_spec.max_tokens
        given, unit = (pass_spec.num_rows, 1) if limit is None else (limit, longest)
        values = [number * unit for number in MULTIPLES]
        if given >= unit:
            values = [given, *values] if pass_spec.key in work.keeps.values else [*values, given]
        for value in values:
            cut = resized(pass_spec, value)
            passes = self.ledger.passes(kind, cut)
            if passes not in seen:
                seen.add(passes)
                yield cut, passes, {pass_spec.key: value}

    @cached_property
    def _recomputes(self) -> list[tuple[OverrideTransformerConfig, dict[str, Any]]]:
        """Recompute nothing, half of the layers or all, each with its settings; without those that kept values rule
        out.
        """
        chunk = max(map(max, self.ledger.stages.chunk_sizes))
        tried = [OverrideTransformerConfig(), OverrideTransformerConfig("full", "uniform", 1)]
        if chunk > 1:
            tried.insert(1, OverrideTransformerConfig("full", "block", chunk // 2))
        configured = self.role.spec.megatron.override_transformer_config
        if configured.recompute_granularity == "selective":
            tried.append(configured)
        group = f"{self.role.group}.override_transformer_config"
        pairs = [(each, {f"{group}.{name}": getattr(each, name) for name in RECOMPUTE}) for each in tried]
        return [pair for pair in pairs if self.work.keeps.allow(pair[1])]

    def _of(self, recompute: OverrideTransformerConfig) -> Recompute:
        return Recompute.of(MegatronConfig(override_transformer_config=recompute))

    def least_cut(self, kind: str, cp: int) -> float:
        """Return a lower bound of the seconds of a pass on this layout with CP of `cp` or more, for all micro-batches.

        It is the time of one micro-batch without filling and draining the pipeline. Filling and draining takes at most
        p - 1 times the slowest stage, or (p - 1) / (v p) of it with v chunks, as there are at least p micro-batches.
        Samples are taken to spread evenly over the ranks. Larger CP only adds traffic.
        """
        if (kind, cp) not in self._least_cut:
            self._least_cut[kind, cp] = self._least(kind, cp) if self.work.times(self.role, kind) else 0.0
        return self._least_cut[kind, cp]

    def _least(self, kind: str, cp: int) -> float:
        grid, is_score = self.grid, kind == SCORE
        estimator = self.work.estimator(self.role, replace(grid, cp=cp), self.shape)
        load = self.work.pass_load(self.role, getattr(self.role.spec, kind), None if is_score else 0.0, 0)
        filling = 1 + (grid.pp - 1) / (1 if grid.vpp is None else grid.vpp * grid.pp)
        samples = load.num_samples if is_score else load.num_samples * load.epochs / load.num_updates
        share = samples * cp / (self.shape.num_ranks // (grid.tp * grid.pp))
        seconds = estimator.forward(load) if is_score else estimator.train(load)
        calls = 1 if is_score else load.num_updates
        return seconds / filling * share / math.ceil(share - 1e-9) + calls * self.call_seconds

    def bytes_of(self, option: Option) -> list[int]:
        """Return the bytes that a pass needs in addition to permanent bytes, on each sampled stage."""
        known, ledger, passes, again = self.work.bytes_of_passes, self.ledger, option.passes, option.again
        key = (id(self.role), self.grid, passes, again, self._optimizer_shares)
        if key not in known:
            held = (
                ledger.forward(pp_rank, passes) if again is None else ledger.update(pp_rank, passes, again)
                for pp_rank in self.stages
            )
            known[key] = [sum(each.values()) for each in held]
        return known[key]

    @cached_property
    def _optimizer_shares(self) -> tuple[int, ...]:
        """What the bytes of an update have of the number of ranks: on CPUs Adam has temporaries of a rank's share."""
        if self.work.device == "cuda" or not self.role.spec.is_trained:
            return ()
        return tuple(self.ledger.weights.optimizer_share(pp_rank) for pp_rank in self.stages)


def parts_of(ledger: RoleLedger, kind: str) -> tuple[int, ...]:
    """Return all of the number of ranks that `RoleLedger.passes` depends on: the samples and examples of a rank."""
    grid, role, sizes = ledger.grid, ledger.role, ledger.config.batch_sizes
    numbers = [sizes.num_samples if kind == SCORE else sizes.mini_batch_samples(role.settings)]
    numbers += [role.mixed.num_examples] if kind == UPDATE and role.mixed is not None else []
    replicas = [grid.num_replicas // size for size in grid.pack_sizes] or [grid.dp_size]
    return tuple(-(-number // size) for size in replicas for number in numbers)


@cache
def resized(pass_spec: PassSpec, size: int) -> PassSpec:
    """Return a pass with other micro-batches. size: tokens where it has a limit of tokens, else rows."""
    return replace(pass_spec, num_rows=size) if pass_spec.max_tokens is None else replace(pass_spec, max_tokens=size)


def sampled_stages(pp_size: int) -> list[int]:
    """Return the pipeline stages that stand for all: of those between the first and the last, the second keeps the
    most activations.
    """
    return sorted({0, min(1, pp_size - 1), pp_size - 1})


def _order(option: Option) -> tuple[float, int]:
    return (option.seconds, -(option.pass_spec.max_tokens or option.pass_spec.num_rows))
