"""What `megatron-rl plan` says about a stage that does not generate: groups, memory and time, as data and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from megatron_rl.config.roles import PassSpec, answers_together
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.tasks import DPO
from megatron_rl.ledger.planner.batch_arithmetic import stage_table
from megatron_rl.ledger.planner.hardware import Hardware
from megatron_rl.ledger.planner.memory import StageMemory, phase_order, plan_pools
from megatron_rl.ledger.planner.memory_report import Change, advice, usable_bytes, worst_of_kinds
from megatron_rl.ledger.planner.run_models import PoolModels, RunModels
from megatron_rl.ledger.planner.run_plan import POOL_HEADINGS, amount, pool_as_json, pool_groups, pool_row
from megatron_rl.ledger.planner.step_time import StepTime, dispatch_seconds, estimator_of, recomputed_share
from megatron_rl.ledger.planner.time import Load
from megatron_rl.observe.summary import layout_table, plain_table


def stage_load(config: RunConfig, length: float) -> Load:
    """One step on sequences of so many tokens."""
    rows = config.data.train_batch_size * answers_together(config)
    longest = config.data.max_prompt_length + config.data.max_response_length
    return Load(rows, 0.0, length, longest, mini_batch=rows, block_tokens=1)


def stage_time(models: RunModels, hardware: Hardware, load: Load) -> StepTime:
    """Seconds of the trained role's update, of the reference's pass where every batch has one, and of kto's passes over
    the step's prompts with other answers.

    Passes for validation, and those that compute a stored reference before the first step, are no part of a step.
    """
    config, seconds, pools = models.config, dict[str, float](), dict[str, tuple[str, ...]]()
    if hardware.is_measured:
        # The rate of products was measured as passes reach it, and what else they take is in the overheads.
        load = replace(load, efficiency_share=1.0)
    has_baseline = config.trainer.stage == DPO and config.dpo.loss == "kto"
    for role in models.placement.megatron_roles:
        pool = models.pools[role.pool]
        estimator = estimator_of(models, pool, role, hardware, pool.grid.cp_size)
        recompute = recomputed_share(pool, role) if role.is_trained else 0.0
        call = dispatch_seconds(pool.spec.size, hardware)
        if role.update is not None:
            units = role.update.num_rows * answers_together(config)
            asked = replace(load, block_tokens=block_tokens(role.update, units, load, pool), recompute=recompute)
            seconds[role.update.phase] = estimator.train(asked) + call
        if role.score is not None and (role.update is None or has_baseline):
            asked = replace(load, block_tokens=block_tokens(role.score, role.score.num_rows, load, pool))
            num_passes = 2 if role.update is None and has_baseline else 1
            seconds[role.score.phase] = num_passes * (estimator.forward(asked) + call)
        pools |= {one.phase: (role.pool,) for one in role.passes}
    order = [phase for phase in phase_order(models.placement.megatron_roles) if phase in seconds]
    return StepTime(
        {phase: seconds[phase] for phase in order},
        {phase: pools[phase] for phase in order},
        tuple((phase,) for phase in order),
    )


def block_tokens(one: PassSpec, num_rows: int, load: Load, pool: PoolModels) -> int:
    """Tokens of one pass on a rank: as many as are joined, or its part of so many rows of mean length."""
    return max(1, one.max_tokens or int(num_rows * load.length / pool.grid.cp_size))


@dataclass(frozen=True)
class StagePlanned:
    """The plan of one stage. length: mean tokens of a sequence, as assumed. changes: what would make it fit."""

    config: RunConfig
    models: RunModels
    hardware: Hardware
    pools: dict[str, list[StageMemory]]
    time: StepTime
    length: float
    changes: list[Change]

    @classmethod
    def of(cls, config: RunConfig, hardware: Hardware, length: float | None = None) -> StagePlanned:
        """For a configuration that has passed preflight. length: None: half of the longest."""
        mean = length or (config.data.max_prompt_length + config.data.max_response_length) / 2
        models = RunModels(config)
        pools, time = plan_pools(models), stage_time(models, hardware, stage_load(config, mean))
        fits = max(stage.peak for stages in pools.values() for stage in stages) <= usable_bytes(hardware)
        return cls(config, models, hardware, pools, time, mean, [] if fits else advice(config, models, hardware))

    @property
    def worst(self) -> StageMemory:
        """The rank that needs most."""
        return max((stage for stages in self.pools.values() for stage in stages), key=lambda stage: stage.peak)

    @property
    def fits(self) -> bool:
        """Whether every pool does."""
        return self.worst.peak <= usable_bytes(self.hardware)

    @property
    def tokens_per_second(self) -> float:
        """Per rank of all pools."""
        tokens = self.config.data.train_batch_size * answers_together(self.config) * self.length
        return tokens / self.time.total / self.models.placement.world_size

    def as_json(self) -> dict[str, Any]:
        """Bytes, seconds and ranks."""
        stages = [stage for stages in self.pools.values() for stage in stages]
        return {
            "stage": self.config.trainer.stage,
            "batch": {name: value for name, value, _ in stage_table(self.config)},
            "pools": {name: pool_as_json(pool) for name, pool in self.models.pools.items()},
            "memory": {
                "hardware": self.hardware.name,
                "usable_bytes": usable_bytes(self.hardware),
                "peak_bytes": self.worst.peak,
                "fits": self.fits,
                "stages": [{"pool": s.pool, "pp_rank": s.pp_rank, "kind": s.kind, "phases": s.phases} for s in stages],
                "changes": [{**change.settings, "peak_bytes": change.peak} for change in self.changes],
            },
            "time": {
                "seconds": self.time.seconds,
                "step_seconds": self.time.total,
                "tokens_per_second_per_rank": self.tokens_per_second,
                "mean_length": self.length,
            },
        }

    def tables(self) -> list[Table]:
        """Everything, in the order in which it is read."""
        groups: list[Sequence[str]] = [
            (name, str(len(groups)), ", ".join(map(str, groups[:4])) + (", ..." if len(groups) > 4 else ""))
            for pool in self.models.pools.values()
            for name, groups in pool_groups(pool).items()
        ]
        rows: list[tuple[str, object, str]] = [
            (phase, f"{seconds:.2f} s", f"{seconds / self.time.total:.0%}")
            for phase, seconds in self.time.seconds.items()
        ]
        note = f"{self.tokens_per_second:.0f} tokens/s per rank, at {self.length:g} tokens a sequence"
        return [
            layout_table(stage_table(self.config)),
            plain_table("Pools of ranks", POOL_HEADINGS, [pool_row(pool) for pool in self.models.pools.values()]),
            plain_table("Groups of ranks", ("group", "number", "ranks"), groups),
            *(self._memory_table(stages) for stages in self.pools.values()),
            layout_table(
                [*rows, ("step", f"{self.time.total:.2f} s", note)], f"One step on {self.hardware.name}, estimated"
            ),
        ]

    def notes(self) -> list[str]:
        """Sentences to be read after the tables."""
        if self.fits:
            return []
        usable = usable_bytes(self.hardware)
        found = [f"the plan does not fit: the worst rank needs {amount(self.worst.peak - usable)} more than there is"]
        found += [f"  change {change}: the worst rank then needs {amount(change.peak)}" for change in self.changes]
        if not self.changes or self.changes[-1].peak > usable:
            found.append("  these are not enough: take more GPUs" if self.changes else "  take more GPUs")
        return found

    def _memory_table(self, stages: list[StageMemory]) -> Table:
        kinds = worst_of_kinds(stages)
        usable = f"the {amount(usable_bytes(self.hardware))} that tensors may have of a {self.hardware.name}"
        rows = [(phase, *(amount(stage.total(phase)) for stage in kinds.values())) for phase in stages[0].phases]
        headings = ("phase", *(f"{kind} stage" for kind in kinds))
        return plain_table(f"Memory per GPU of {stages[0].pool}, of {usable}", headings, rows)
