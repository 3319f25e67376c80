"""plan.json in a run's folder: its configuration, and what was planned for it, to read next to what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict

from megatron_rl.config.task_config import TaskConfig
from megatron_rl.config.urls import without_secrets
from megatron_rl.controller.run_logger import RunLogger
from megatron_rl.observe.appended_file import replace_file
from megatron_rl.observe.summary import PLAN_FILE, finite_or_null
from megatron_rl.planning.hardware import planned_hardware
from megatron_rl.planning.run_plan import RunPlan, mean_lengths
from megatron_rl.planning.task_plan import TaskPlan


def write_plan(logger: RunLogger) -> None:
    """Write it, of the numbers that `megatron-rl plan --json` prints; warns where that fails.

    A start that trains nothing keeps the plan of the steps that were taken.
    """
    if logger.folder.keeps(PLAN_FILE):
        return
    config, hardware = logger.config, planned_hardware(logger.config)
    plan: RunPlan | TaskPlan
    if isinstance(config, TaskConfig):
        plan = TaskPlan.of(config, hardware, None)
    else:
        plan = RunPlan.of(config, hardware, mean_lengths(config.data, None, None))
    content = {"config": without_secrets(asdict(config)), "plan": plan.as_json()}
    try:
        text = json.dumps(finite_or_null(content), indent=1, allow_nan=False, default=str)
        replace_file(logger.folder.path / PLAN_FILE, text.encode() + b"\n")
    except OSError as error:
        logger.warn(f"{PLAN_FILE} could not be written: {error}")
