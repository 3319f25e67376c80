"""The plan of a task that does not generate (sft, reward, dpo): groups, memory and time, as data and as tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from megatron_rl.config.roles import Placement
from megatron_rl.config.task_config import TaskConfig
from megatron_rl.config.tasks import DPO
from megatron_rl.observe.summary import layout_table
from megatron_rl.planning.batch_arithmetic import task_table
from megatron_rl.planning.fitting_changes import FittingChanges, changes_as_json, misfit_notes
from megatron_rl.planning.folder_files import end_token_notes
from megatron_rl.planning.follower_transfers import follower_transfers
from megatron_rl.planning.hardware import Hardware
from megatron_rl.planning.lora_rules import lora_notes
from megatron_rl.planning.memory import RESHARD, phase_order, plan_pools
from megatron_rl.planning.memory_report import MemoryReport
from megatron_rl.planning.plan_tables import (
    groups_table,
    memory_table,
    pool_as_json,
    pool_groups,
    pools_table,
)
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.step_load import Load
from megatron_rl.planning.step_time import (
    StepTime,
    block_tokens,
    dispatch_seconds,
    estimator_of,
)


def task_load(config: TaskConfig, length: float) -> Load:
    """Return the load of one step on sequences of `length` tokens."""
    rows = config.data.train_batch_size * config.answers_together
    return Load(rows, 0.0, length, config.longest_sequence, mini_batch=rows, block_tokens=1)


def task_time(config: TaskConfig, models: RunModels, hardware: Hardware, load: Load) -> StepTime:
    """Return the seconds of one step: the update, the reference's pass where every batch has one, and with kto the
    passes over the step's prompts with other responses.

    Passes for validation, and those that compute a stored reference before the first step, do not count.
    """
    seconds, pools = dict[str, float](), dict[str, tuple[str, ...]]()
    if hardware.is_measured:
        # The rate was measured with passes like these; whatever else they take is in the overheads.
        load = replace(load, efficiency_share=1.0)
    has_baseline = config.trainer.stage == DPO and "kto" in config.dpo.loss
    for role in models.placement.megatron_roles:
        pool = models.pools[role.pool]
        estimator = estimator_of(pool, role, hardware, pool.grid.cp_size)
        recompute = pool.ledger(role).recomputed_share() if role.is_trained else 0.0
        call = dispatch_seconds(pool.spec.size.num_nodes, pool.spec.size.num_ranks_per_node, hardware)
        if role.update is not None:
            rows = replace(role.update, num_rows=role.update.num_rows * config.answers_together)
            asked = replace(load, block_tokens=block_tokens(load, rows, pool.grid.cp_size), recompute=recompute)
            seconds[role.update.phase] = estimator.train(asked) + call
        if role.score is not None and (role.update is None or has_baseline):
            asked = replace(load, block_tokens=block_tokens(load, role.score, pool.grid.cp_size))
            num_passes = 2 if role.update is None and has_baseline else 1
            seconds[role.score.phase] = num_passes * (estimator.forward(asked) + call)
        pools |= {pass_spec.phase: (role.pool,) for pass_spec in role.passes}
    for transfer in follower_transfers(models):
        seconds[RESHARD] = seconds.get(RESHARD, 0.0) + transfer.seconds(hardware)
        pools[RESHARD] = (models.training.spec.name, transfer.role.pool)
    order = [phase for phase in phase_order(models.placement.megatron_roles) if phase in seconds]
    return StepTime(
        {phase: seconds[phase] for phase in order},
        {phase: pools[phase] for phase in order},
        tuple((phase,) for phase in order),
    )


@dataclass(frozen=True)
class TaskPlan:
    """The plan of one task. length: assumed mean tokens of a sequence. fitting: what would make it fit; None where
    it does.
    """

    config: TaskConfig
    models: RunModels
    memory: MemoryReport
    time: StepTime
    length: float
    fitting: FittingChanges | None

    @classmethod
    def of(cls, config: TaskConfig, hardware: Hardware, length: float | None = None) -> TaskPlan:
        """Plan a configuration that has passed preflight. length: None: half of the longest sequence."""
        mean = length or config.longest_sequence / 2
        models = RunModels(config)
        memory = MemoryReport(hardware, plan_pools(models))
        time = task_time(config, models, hardware, task_load(config, mean))
        fitting = None if memory.fits else FittingChanges.of(config, models, hardware)
        return cls(config, models, memory, time, mean, fitting)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and rank, over all pools."""
        tokens = self.config.data.train_batch_size * self.config.answers_together * self.length
        return tokens / self.time.total / self.models.placement.world_size

    def as_json(self) -> dict[str, Any]:
        """Bytes, seconds and ranks."""
        return {
            "stage": self.config.trainer.stage,
            "batch": {name: value for name, value, _ in task_table(self.config)},
            "pools": {name: pool_as_json(pool) for name, pool in self.models.pools.items()},
            "memory": self.memory.as_json() | {"changes": changes_as_json(self.fitting)},
            "time": {
                "seconds": self.time.seconds,
                "step_seconds": self.time.total,
                "tokens_per_second_per_rank": self.tokens_per_second,
                "mean_length": self.length,
            },
        }

    def tables(self) -> list[Table]:
        """All tables, in the order of printing."""
        pools = self.models.pools.values()
        rows: list[tuple[str, object, str]] = [
            (phase, f"{seconds:.2f} s", f"{seconds / self.time.total:.0%}")
            for phase, seconds in self.time.seconds.items()
        ]
        note = f"{self.tokens_per_second:.0f} tokens/s per rank, at {self.length:g} tokens a sequence"
        rows.append(("step", f"{self.time.total:.2f} s", note))
        return [
            layout_table(task_table(self.config)),
            pools_table(pools),
            groups_table(item for pool in pools for item in pool_groups(pool).items()),
            *(memory_table(self.memory, pool, f" of {pool}") for pool in self.models.pools),
            layout_table(rows, f"One step on {self.memory.hardware.name}, estimated"),
        ]

    def notes(self) -> list[str]:
        """Sentences to print after the tables."""
        path = Placement.of(self.config).leader.model_path
        notes = [*end_token_notes(path), *lora_notes(self.config)]
        return notes if self.fitting is None else [*notes, *misfit_notes(self.memory, "", self.fitting)]
