"""Reward models: one straight loop on the controller.

ranked or scored responses -> a score at the last token of each -> update
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megatron_rl.checkpoint.score_statistics import SCORE_MEAN, SCORE_STD, ScoreStatistics
from megatron_rl.config.roles import CRITIC
from megatron_rl.config.task_config import TaskConfig
from megatron_rl.controller.repairs import Repairs, with_repairs
from megatron_rl.losses.objectives import reward_objective
from megatron_rl.losses.terms import Answers
from megatron_rl.records import Batch, answer_rows, num_answers
from megatron_rl.roles.reward_training import TrainableRewardModel
from megatron_rl.tasks.calibration import draw_calibration
from megatron_rl.tasks.task_report import NUM_PARITY_ROWS, export_scorer, finish_task
from megatron_rl.tasks.task_run import TaskRun, open_task
from megatron_rl.tasks.training_records import reward_batch
from megatron_rl.tasks.validation_loss import LOSS


def reward(config: TaskConfig, local: bool = False) -> dict[str, Any]:
    """Train a reward model and return the summary that is also written to `summary.json`, else as `train.train`."""
    return with_repairs(config, local, lambda repairs: reward_once(repairs, local))


def reward_once(repairs: Repairs, local: bool) -> dict[str, Any]:
    """Train from where the run stands, with ranks that are started now."""
    with open_task(repairs, local) as run:
        scorer = run.role(TrainableRewardModel)
        run.held_out.begin(partial(measured, run), run.life.is_resumed)
        for step in run.life.steps():
            batch = run.with_images(reward_batch(run.data.next()))
            metrics = run.logger.update_metrics(CRITIC, [scorer.update(batch, len(batch))])
            metrics |= run.describe(batch.flat("input_ids").numel())
            run.logger.log(metrics | run.held_out.after(step), step)
        held_out = run.with_images(reward_batch(run.data.val))
        scores = scorer.scores(held_out).get()
        draw_calibration(run, held_out, scores)
        rows, statistics = held_out[:NUM_PARITY_ROWS], statistics_of(scores)
        return finish_task(run, lambda: export_scorer(run, scorer, rows, statistics))


def measured(run: TaskRun) -> dict[str, float]:
    """Loss of all held-out responses, and metrics of scores and pairs."""
    batch = run.with_images(reward_batch(run.data.val))
    return loss_metrics(run.config, batch, run.role(TrainableRewardModel).scores(batch).get())


def loss_metrics(config: TaskConfig, batch: Batch, scored: Batch) -> dict[str, float]:
    """`val/loss`, mean and standard deviation of the scores, and the metrics of the loss."""
    scores = scored.flat("answer_scores")
    lengths = answer_rows(batch).num_sampled
    answers = Answers(scores, batch.flat("given"), batch.flat("labels"), num_answers(batch), torch.zeros(()), lengths)
    terms = reward_objective(config.reward_training)(answers)
    means = {f"val/{name}": float(pair[0] / pair[1]) for name, pair in terms.metrics.items() if pair[1]}
    statistics = statistics_of(scored)
    return {LOSS: float(terms.loss.mean()), SCORE_MEAN: statistics.mean, SCORE_STD: statistics.std} | means


def statistics_of(scored: Batch) -> ScoreStatistics:
    """Mean and standard deviation of all scores; 0 for the latter if there is one score."""
    scores = scored.flat("answer_scores").double()
    return ScoreStatistics(float(scores.mean()), float(scores.std()) if scores.numel() > 1 else 0.0)
