"""What the planner thinks of a project: seconds of a step, hours in all, memory. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.hardware import planned_hardware
from megatron_rl.planning.memory_report import with_kv_cache
from megatron_rl.planning.run_plan import RunPlan

MOST_STEP_SECONDS = 60.0
"""Seconds of a step on a CPU that a first run may take."""
GENERATION = "gen"


@dataclass(frozen=True)
class PlannedRun:
    """step_seconds: of a step. seconds: of all steps and validations. memory_bytes: of the rank that needs most."""

    step_seconds: float
    seconds: float
    num_steps: int
    memory_bytes: int
    hardware: str

    def __str__(self) -> str:
        """Return the line that `init` ends with."""
        return (
            f"planned on {self.hardware}: {self.step_seconds:.3g} s a step, {duration(self.seconds)} for "
            f"{self.num_steps} steps with validation; {self.memory_bytes / 1e9:.2g} GB for each rank"
        )


def planned_run(config: RunConfig, num_held_out: int) -> PlannedRun:
    """Plan a configuration that has passed preflight. num_held_out: prompts of a validation."""
    hardware = planned_hardware(config)
    plan = RunPlan.of(with_kv_cache(config, hardware), hardware)
    trainer, steps = config.trainer, config.trainer.num_steps
    validations = trainer.val_before_train + -(-steps // trainer.test_freq) if trainer.test_freq > 0 else 0
    share = num_held_out * config.actor_rollout_ref.rollout.val_kwargs.n / config.batch_sizes.num_generated_samples
    seconds = steps * plan.step_seconds + validations * share * plan.seconds[GENERATION]
    return PlannedRun(plan.step_seconds, seconds, steps, plan.memory.peak, hardware.name)


def duration(seconds: float) -> str:
    """Return seconds in the largest unit of which there are at least two."""
    for unit, size in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} seconds"
