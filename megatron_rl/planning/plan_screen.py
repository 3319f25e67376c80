"""The plan of a run on one screen: does it fit, which rank is the fullest, how long is a step, what is the layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.trainer import TrainerConfig
from megatron_rl.observe.program import next_command
from megatron_rl.planning.batch_arithmetic import batch_table, task_table
from megatron_rl.planning.follower_transfers import follower_transfers
from megatron_rl.planning.memory_report import MemoryReport
from megatron_rl.planning.plan_tables import amount, pool_row, usable_amount
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.run_plan import RunPlan
from megatron_rl.planning.task_plan import TaskPlan

Row = tuple[str, object, str]
LARGEST = 3
"""Tensors of the worst rank, and phases of a step, that are named."""
OF_BATCH = ("responses per prompt", "samples per step", "examples per step", "micro-batches per rank")
DECIDED = re.compile(r"(parallel_size|nnodes|n_gpus_per_node|memory_bytes|memory_utilization|offload)$|pool")
"""Keys that `map` decides."""
MINUTE, HOUR = 60.0, 3600.0


def screen_rows(plan: RunPlan | TaskPlan) -> list[Row]:
    """Return rows (name, value, meaning) of what is asked first."""
    rows: list[Row] = [*_memory_rows(plan.memory, len(plan.models.pools) > 1)]
    if isinstance(plan, TaskPlan):
        rows += _time_rows(plan.time.seconds, plan.time.total, plan.config.trainer)
        rows.append(("tokens", f"{plan.tokens_per_second:.0f}/s", f"on each rank, at {plan.length:g} a sequence"))
    elif not plan.config.trainer.val_only:
        rows += _time_rows(plan.seconds, plan.step_seconds, plan.config.trainer)
        prompt, response = plan.mean_lengths
        note = f"on each rank; {prompt:g} a prompt, {response:g} a response (--prompt-length, --response-length)"
        rows.append(("tokens", f"{plan.tokens_per_second:.0f}/s", note))
    rows += _pool_rows(plan.models)
    table = task_table(plan.config) if isinstance(plan, TaskPlan) else batch_table(plan.config)
    rows += [row for row in table if row[0] in OF_BATCH]
    rows += _follower_rows(plan.models)
    return rows if isinstance(plan, TaskPlan) else [*rows, *_generation_rows(plan)]


def _memory_rows(memory: MemoryReport, several: bool) -> list[Row]:
    worst = memory.worst
    held = sorted(worst.phases[worst.worst_phase].items(), key=lambda item: -item[1])[:LARGEST]
    where = f"{worst.kind} stage{f' of {worst.pool}' if several else ''}, phase {worst.worst_phase}"
    return [
        ("fits into memory", "yes" if memory.fits else "NO", f"of {usable_amount(memory)}"),
        ("worst rank", amount(memory.peak), f"{where}: " + ", ".join(f"{name} {amount(size)}" for name, size in held)),
    ]


def _time_rows(seconds: dict[str, float], total: float, trainer: TrainerConfig) -> list[Row]:
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:LARGEST]
    shares = ", ".join(f"{phase} {spent:.2f} s" for phase, spent in slowest)
    rows: list[Row] = [("one step", f"{total:.2f} s", f"estimated; {shares}")]
    steps = trainer.total_training_steps
    return rows if not steps else [*rows, ("all steps", duration(total * steps), f"{steps} steps, without validation")]


def duration(seconds: float) -> str:
    """Return seconds in the unit that people would use."""
    if seconds < MINUTE:
        return f"{seconds:.0f} s"
    return f"{seconds / MINUTE:.1f} min" if seconds < HOUR else f"{seconds / HOUR:.1f} h"


def _pool_rows(models: RunModels) -> list[Row]:
    rows: list[Row] = []
    for pool in models.pools.values():
        name, _, roles, layout, _ = pool_row(pool)
        size = pool.spec.size
        label = "layout" if len(models.pools) == 1 else f"layout of {name}"
        ranks = f"{size.world_size} rank{'s' * (size.world_size > 1)}"
        nodes = f" on {size.num_nodes} nodes" if size.num_nodes > 1 else ""
        rows.append((label, ranks + nodes, f"{layout}; {roles}"))
    return rows


def _generation_rows(plan: RunPlan) -> list[Row]:
    memory, transition = plan.memory, plan.transition
    cache = f"{memory.kv_sequences} sequences of {memory.longest} tokens at once"
    moved = transition.mean_network + transition.mean_link
    rows: list[Row] = [("KV cache", amount(memory.kv_bytes), f"{cache}; at most {amount(memory.room_kv_bytes)} fit")]
    if not plan.config.trainer.val_only:
        rows.append(("weight transfer", amount(moved), "a step, to a rank that generates"))
    return rows


def _follower_rows(models: RunModels) -> list[Row]:
    rows: list[Row] = []
    for transfer in follower_transfers(models):
        when = "a step" if transfer.follows.every == 1 else f"every {transfer.follows.every} steps"
        note = f"{when}, to a rank of {transfer.role.pool}"
        rows.append((f"weights for {transfer.role.name}", amount(max(transfer.received)), note))
    return rows


def search_command(plan: RunPlan, config: Path, overrides: Sequence[str], hardware: str | None) -> str:
    """Return the command that searches other layouts of the run, on as many ranks, with the overrides that it keeps."""
    ranks = plan.models.placement.world_size
    kept = [text for text in overrides if not DECIDED.search(text.partition("=")[0])]
    chosen = () if hardware is None else ("--hardware", hardware)
    return next_command("map", "--config", config, "--gpus", ranks, *chosen, *kept)
