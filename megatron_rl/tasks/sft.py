"""Supervised fine-tuning: one straight loop on the controller.

examples -> cross-entropy of the tokens that count -> update
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from megatron_rl.columns import SCORING
from megatron_rl.config.roles import ACTOR
from megatron_rl.config.task_config import TaskConfig
from megatron_rl.controller.repairs import Repairs, with_repairs
from megatron_rl.controller.report import export_policy
from megatron_rl.data.reading import token_batch
from megatron_rl.roles.supervised_policy import SupervisedPolicy
from megatron_rl.tasks.task_report import NUM_PARITY_ROWS, finish_task
from megatron_rl.tasks.task_run import TaskRun, open_task
from megatron_rl.tasks.validation_loss import LOSS


def sft(config: TaskConfig, local: bool = False) -> dict[str, Any]:
    """Tune as configured and return the summary that is also written to `summary.json`; otherwise as `train.train`."""
    return with_repairs(config, local, lambda repairs: sft_once(repairs, local))


def sft_once(repairs: Repairs, local: bool) -> dict[str, Any]:
    """Tune from where the run stands, with ranks that are started now."""
    with open_task(repairs, local) as run:
        policy = run.role(SupervisedPolicy)
        run.held_out.begin(partial(measured, run), run.life.is_resumed)
        for step in run.life.steps():
            run.logger.log(take_step(run) | run.held_out.after(step), step)
        rows = run.with_images(token_batch(run.data.val[:NUM_PARITY_ROWS])).read_by(SCORING)
        return finish_task(run, lambda: export_policy(run, policy, rows, run.patches_of))


def take_step(run: TaskRun) -> dict[str, float]:
    """Take one optimizer step on the next batch; returns its metrics."""
    batch = run.with_images(token_batch(run.data.next()))
    metrics = run.logger.update_metrics(ACTOR, [run.role(SupervisedPolicy).update(batch)])
    return metrics | run.describe(batch["input_ids"].values().numel())


def measured(run: TaskRun) -> dict[str, float]:
    """Cross-entropy per token of all held-out examples, and perplexity."""
    batch = run.with_images(token_batch(run.data.val))
    summed = run.role(SupervisedPolicy).log_likelihoods(batch).get()["scores"].double().sum()
    loss = -float(summed / float(batch.num_sampled.sum()))
    return {LOSS: loss, "val/perplexity": math.exp(min(loss, 700.0))}
