"""How long a method of a rank may go without progress before the run counts as hung."""

from __future__ import annotations

from megatron_rl.config.schema import RunConfig
from megatron_rl.ledger.planner.hardware import planned_hardware
from megatron_rl.ledger.planner.memory_report import memory_report
from megatron_rl.ledger.planner.run_models import RunModels
from megatron_rl.ledger.planner.step_time import step_load, step_time
from megatron_rl.ledger.planner.task_plan import stage_load, stage_time
from megatron_rl.ledger.planner.transition import TransitionPlan

SHORTEST_S = 1800.0
"""Starting engines, reading and writing of files are not planned and can take that long on a slow file system."""

PHASES = 10.0
"""Methods make progress many times in a phase, so that ten whole phases without any are no slow machine."""


def stall_timeout_s(config: RunConfig) -> float:
    """Seconds: `trainer.stall_timeout_s`, or where that is null what follows from the planned times of this run."""
    if config.trainer.stall_timeout_s is not None:
        return config.trainer.stall_timeout_s
    hardware, models = planned_hardware(config.trainer), RunModels(config)
    if not models.placement.generates:
        tokens = float(config.data.max_prompt_length + config.data.max_response_length)
        return max(SHORTEST_S, PHASES * stage_time(models, hardware, stage_load(config, tokens)).total)
    longest = (float(config.data.max_prompt_length), float(config.data.max_response_length))
    load = step_load(config, memory_report(config, models, hardware), longest)
    seconds = step_time(models, hardware, load, TransitionPlan.of(models)).seconds
    return max(SHORTEST_S, PHASES * max(seconds.values()))
