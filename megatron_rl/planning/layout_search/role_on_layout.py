"""Options of a role's passes on one layout: micro-batches and recomputed layers, with seconds and bytes of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from megatron_rl.config.megatron import MegatronConfig, OverrideTransformerConfig
from megatron_rl.config.roles import PassSpec
from megatron_rl.planning.activations import Recompute
from megatron_rl.planning.layout_search.grids import Grid, GridShape
from megatron_rl.planning.layout_search.search_problem import RoleWork, SearchProblem
from megatron_rl.planning.role_ledger import SCORE, UPDATE, Passes
from megatron_rl.planning.step_time import dispatch_seconds

MULTIPLES = (1, 2, 4, 8, 16, 32)
"""Numbers of samples of the longest length in a micro-batch that are tried."""
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


@dataclass(frozen=True)
class Option:
    """One way to run one pass of a role on one layout.

    kind: score or update. recompute: None for a score. work: rank-seconds of all ranks where they share cores, else 0.
    """

    kind: str
    pass_spec: PassSpec
    passes: Passes
    recompute: OverrideTransformerConfig | None
    seconds: float
    settings: dict[str, Any] = field(compare=False)
    work: float = 0.0


class RoleOnLayout:
    """One role on one layout of a pool: the bytes it holds, and the options of its passes."""

    def __init__(self, work: SearchProblem, role: RoleWork, grid: Grid, shape: GridShape) -> None:
        self.work, self.role, self.grid, self.shape = work, role, grid, shape
        self.call_seconds = dispatch_seconds(shape.num_nodes, shape.per_node, work.hardware)
        self.ledger = role.ledger(work.config, grid, shape)
        self.stages = sampled_stages(grid.pp)
        self.held = [self.ledger.held(pp_rank) for pp_rank in self.stages]
        self._bytes: dict[int, list[int]] = {}
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
        configured: PassSpec = getattr(role.spec, kind)
        estimator = work.estimator(role, self.grid, self.shape)
        again = self._recomputes if kind == UPDATE else []
        shares = [self.ledger.recomputed_share(self._of(each)) for each, _ in again]
        for pass_spec, passes, cut in self._cuts(kind, configured):
            if not work.keeps.allow(cut):
                continue
            if kind == SCORE:
                load = work.pass_load(role, pass_spec, None, self.grid.cp)
                seconds = estimator.forward(load) + self.call_seconds if work.times(role, kind) else 0.0
                yield Option(kind, pass_spec, passes, None, seconds, cut)
                continue
            for (recompute, settings), share in zip(again, shares, strict=True):
                load = work.pass_load(role, pass_spec, share, self.grid.cp)
                busy = estimator.trained(load)
                seconds = estimator.seconds(busy) + load.num_updates * self.call_seconds
                rank_seconds = busy.work * self.shape.num_ranks if work.hardware.parallel_ranks else 0.0
                yield Option(kind, pass_spec, passes, recompute, seconds, cut | settings, rank_seconds)

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
        if id(option) not in self._bytes:
            ledger, passes = self.ledger, option.passes
            again = None if option.recompute is None else self._of(option.recompute)
            held = (
                ledger.forward(pp_rank, passes) if again is None else ledger.update(pp_rank, passes, again)
                for pp_rank in self.stages
            )
            self._bytes[id(option)] = [sum(each.values()) for each in held]
        return self._bytes[id(option)]


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
