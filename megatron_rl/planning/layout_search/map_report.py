"""Tables, sentences and JSON of `map`: the best placements, seconds and bytes of each, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from megatron_rl.observe.summary import plain_table
from megatron_rl.planning.layout_search.exact_ranking import Candidate
from megatron_rl.planning.layout_search.pools import PoolChoice
from megatron_rl.planning.layout_search.search_problem import SearchProblem, attention_dp
from megatron_rl.planning.layout_search.search_result import SearchResult
from megatron_rl.planning.memory import GEN, RESHARD

SHORT = {"reward_model": "rm", "reference": "ref"}
IDLE, BUBBLE = 0.1, 0.1
"""Shares of idle ranks and of pipeline bubbles above which they are named as the limit."""


def placement_table(mapped: SearchResult) -> Table:
    """Roles, ranks, layout and memory: one row for each pool of each candidate."""
    rows, dp_size = [], attention_dp(mapped.request.work)
    for number, candidate in enumerate(mapped.candidates, start=1):
        for place, choice in enumerate(candidate.placed.choices):
            name = list(candidate.memory)[place]
            first = (str(number), f"{candidate.seconds:.2f} s") if place == 0 else ("", "")
            rows.append(
                (
                    *first,
                    roles_of_pool(choice),
                    ranks_of_pool(choice),
                    layout_of_pool(choice, dp_size),
                    *_peak(candidate, name),
                )
            )
    headings = ("", "step", "roles", "ranks", "layout", "memory", "worst in")
    return plain_table("Placements, fastest first", headings, rows)


def _peak(candidate: Candidate, pool: str) -> tuple[str, str]:
    stage = candidate.memory[pool]
    return f"{stage.peak / 1e9:.1f} GB" if stage.peak >= 1e8 else f"{stage.peak / 1e6:.1f} MB", stage.worst_phase


def time_table(mapped: SearchResult) -> Table:
    """Seconds of every phase of each candidate, and what limits its step."""
    phases = list(dict.fromkeys(phase for candidate in mapped.candidates for phase in candidate.time.seconds))
    rows = []
    for number, candidate in enumerate(mapped.candidates, start=1):
        path = set(candidate.time.critical_path)
        marks = [
            f"{candidate.time.seconds[phase]:.2f}{'' if phase in path else '*'}"
            if phase in candidate.time.seconds
            else ""
            for phase in phases
        ]
        rows.append((str(number), *marks, limit_of(mapped.request.work, candidate)))
    return plain_table("Seconds of each phase; * in parallel with others", ("", *phases, "what limits it"), rows)


def roles_of_pool(choice: PoolChoice) -> str:
    """Return the short names of a pool's roles."""
    return " ".join(SHORT.get(name, name) for name in choice.block)


def ranks_of_pool(choice: PoolChoice) -> str:
    """Return machines and ranks of each."""
    return f"{choice.shape.num_nodes} x {choice.shape.per_node}"


def layout_of_pool(choice: PoolChoice, dp_size: int) -> str:
    """Return the layouts of training and of generation. dp_size: attention DP."""
    parts = []
    if choice.grid is not None:
        dp = choice.shape.num_ranks // (choice.grid.tp * choice.grid.cp * choice.grid.pp)
        parts.append(f"{choice.grid} DP{dp}")
    if choice.generation is not None:
        tp_size = choice.generation.tp
        layout = f"rollout TP{tp_size}" + f" DP{dp_size}" * (dp_size > 1)
        parts.append(f"{layout} x {choice.shape.num_ranks // (tp_size * dp_size)}")
    return ", ".join(parts)


def limit_of(work: SearchProblem, candidate: Candidate) -> str:
    """Return the longest phase of the critical path, its share of the step, and the reasons."""
    path = candidate.time.critical_path
    seconds = candidate.time.seconds
    worst = max(path, key=lambda phase: seconds[phase])
    share = f"{worst} {seconds[worst] / candidate.time.total:.0%}"
    if candidate.is_ahead:
        share = f"asynchronous; {share}"
    return f"{share}: {', '.join(reasons(work, candidate, worst)) or 'FLOPs'}"


def reasons(work: SearchProblem, candidate: Candidate, phase: str) -> Iterator[str]:
    """Yield what besides FLOPs makes a phase take its time."""
    choices = candidate.placed.choices
    if phase == GEN:
        choice = next(choice for choice in choices if choice.generation is not None)
        assert choice.generation is not None  # by the condition above
        yield from _of_generation(work, choice)
        return
    if phase == RESHARD:
        yield "bytes of weights"
        return
    for choice in choices:
        for name in choice.block:
            if name not in work.roles:
                continue
            spec = work.roles[name].spec
            for kind, pass_spec in (("score", spec.score), ("update", spec.update)):
                if pass_spec is not None and pass_spec.phase == phase:
                    yield from _of_pass(work, choice, name, kind)


def _of_generation(work: SearchProblem, choice: PoolChoice) -> Iterator[str]:
    generation = choice.generation
    assert generation is not None  # the caller chose a pool that generates
    replicas = choice.shape.num_ranks // generation.tp
    mine = math.ceil(work.load.num_samples / replicas)
    cache = work.cache(generation.tp)
    mean = work.load.prompt + work.load.response / 2
    fitting = int(cache.num_tokens(generation.kv_bytes, mean) / mean)
    if fitting < min(mine, work.load.max_seqs):
        yield f"the cache holds {fitting} of {mine} sequences"
    elif work.load.max_seqs < mine:
        yield f"max_num_seqs={work.load.max_seqs} of {mine} sequences"
    elif mine * replicas > (1 + IDLE) * work.load.num_samples:
        yield f"{replicas} replicas for {work.load.num_samples} samples"
    else:
        yield "reads weights for the longest responses"


def _of_pass(work: SearchProblem, choice: PoolChoice, name: str, kind: str) -> Iterator[str]:
    grid, role, option = choice.grid, work.roles[name], choice.options[name][kind]
    assert grid is not None  # a role on Megatron's grid
    dp = choice.shape.num_ranks // (grid.tp * grid.cp * grid.pp)
    sizes = work.config.batch_sizes
    samples = sizes.mini_batch_samples(role.spec.settings) if kind == "update" else sizes.num_samples
    mine = math.ceil(samples / dp)
    if mine * dp > (1 + IDLE) * samples:
        yield f"DP {dp} for {samples} samples"
    length = work.load.length
    block = (option.pass_spec.max_tokens or 0) * grid.cp or option.pass_spec.num_rows * length
    blocks = max(1, math.ceil(mine * length / max(block, length)))
    bubble = (grid.pp - 1) / (grid.vpp or 1) / blocks
    if bubble > BUBBLE:
        yield f"bubble {bubble / (1 + bubble):.0%}"
    if option.recompute is not None and option.recompute.recompute_granularity is not None:
        yield "recomputed layers"


def sentences(mapped: SearchResult) -> list[str]:
    """Return the sentences after the tables."""
    best = mapped.candidates[0]
    return [
        f"searched {mapped.num_layouts} layouts of pools and {mapped.num_placements} allocations in "
        f"{mapped.search_seconds:.1f} s; {mapped.num_skipped} allocations cannot be faster by lower bounds",
        f"exact over its space; FLOPs and the best generation alone take {mapped.lower_bound:.2f} s of any placement: "
        f"the best is {mapped.gap:.0%} above what no layout can beat",
        *([f"trainer.rollout_ahead={best.placed.ahead}: responses are up to a step old"] if best.is_ahead else []),
    ]


def as_json(mapped: SearchResult) -> dict[str, Any]:
    """Return everything as data, candidates best first."""
    work = mapped.request.work
    return {
        "candidates": [
            {
                "settings": candidate.settings,
                "step_seconds": candidate.seconds,
                "seconds": candidate.time.seconds,
                "critical_path": candidate.time.critical_path,
                "memory_bytes": {pool: stage.peak for pool, stage in candidate.memory.items()},
                "worst_phase": {pool: stage.worst_phase for pool, stage in candidate.memory.items()},
                "pools": {
                    pool: {
                        "roles": list(choice.block),
                        "nnodes": choice.shape.num_nodes,
                        "n_gpus_per_node": choice.shape.per_node,
                        "layout": layout_of_pool(choice, attention_dp(mapped.request.work)),
                    }
                    for pool, choice in zip(candidate.memory, candidate.placed.choices, strict=True)
                },
                "rollout_ahead": candidate.placed.ahead,
                "estimate_seconds": candidate.estimate,
                "limit": limit_of(work, candidate),
            }
            for candidate in mapped.candidates
        ],
        "search_seconds": mapped.search_seconds,
        "usable_bytes": work.usable,
        "lower_bound_seconds": mapped.lower_bound,
        "gap": mapped.gap,
        "layouts": mapped.num_layouts,
        "placements": mapped.num_placements,
        "skipped": mapped.num_skipped,
    }
