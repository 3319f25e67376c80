"""Preferences without a reward model: one straight loop on the controller.

preferred and other responses -> log-probs of the reference -> losses of `dpo.loss` -> update
"""

from __future__ import annotations

from typing import Any

from megatron_rl.columns import SCORING
from megatron_rl.config.roles import ACTOR
from megatron_rl.config.task_config import TaskConfig
from megatron_rl.controller.repairs import Repairs, with_repairs
from megatron_rl.controller.report import export_policy
from megatron_rl.records import answer_rows
from megatron_rl.roles.supervised_policy import SupervisedPolicy
from megatron_rl.tasks.reference_log_probs import Preferences
from megatron_rl.tasks.task_data import TRAIN
from megatron_rl.tasks.task_report import NUM_PARITY_ROWS, finish_task
from megatron_rl.tasks.task_run import open_task
from megatron_rl.tasks.training_records import preference_batch


def dpo(config: TaskConfig, local: bool = False) -> dict[str, Any]:
    """Learn preferences and return the summary that is also written to `summary.json`; otherwise as `train.train`."""
    return with_repairs(config, local, lambda repairs: dpo_once(repairs, local))


def dpo_once(repairs: Repairs, local: bool) -> dict[str, Any]:
    """Learn from where the run stands, with ranks that are started now."""
    with open_task(repairs, local) as run:
        policy, preferences = run.role(SupervisedPolicy), Preferences(run)
        preferences.store_reference()
        run.held_out.begin(preferences.measured, run.life.is_resumed)
        for step in run.life.steps():
            numbers = run.data.cursor.next_indices()
            batch, baseline = preferences.batch(TRAIN, numbers), preferences.baseline(TRAIN, numbers)
            updated = policy.update_preferences(batch, len(batch), baseline)
            metrics = run.logger.update_metrics(ACTOR, [updated])
            run.refresh_reference(step)
            metrics |= run.describe(batch.flat("input_ids").numel())
            run.logger.log(metrics | run.held_out.after(step), step)
        held_out = run.with_images(preference_batch(run.data.val[:NUM_PARITY_ROWS]))
        rows = answer_rows(held_out).read_by(SCORING)
        return finish_task(run, lambda: export_policy(run, policy, rows, run.patches_of))
