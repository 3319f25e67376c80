"""PPO, from prompts to new weights: one straight loop on the controller, every method visible.

    prompts -> generate -> log-probs, values, rewards -> advantages -> update critic, actor -> reshard

Other algorithms use this loop with another estimator or loss, without the roles that they do not need.
Methods of roles run on every rank of the role's pool and return futures; `.get()` waits. Independent calls are started
before any of them is waited for, so that roles in different pools run at the same time.
What scores a batch is a scorer: `run.scorers` has all of them (`controller/run_scorers.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.config.schema import RunConfig
from megatron_rl.controller.repairs import Repairs, with_repairs
from megatron_rl.controller.report import finish_run
from megatron_rl.controller.run import Run, open_run
from megatron_rl.dispatch import Future
from megatron_rl.records import Batch
from megatron_rl.scoring.batch_scorers import score


def train(config: RunConfig, local: bool = False, replay: Path | None = None) -> dict[str, Any]:
    """Run PPO as configured and return the summary that is also written to `summary.json`.

    Resumes from the newest checkpoint, or as `trainer.resume_mode` says. local: one rank, all roles in this process.
    replay: the folder of a run whose recorded schedule of generation is repeated.
    Lost processes and nodes are repaired up to `trainer.max_repairs` times.
    Raises MegatronRLError if a rank or a reward function fails, or a signal asks the run to stop. No process is left.
    """
    return with_repairs(config, local, lambda repairs: train_once(repairs, local, replay))


def train_once(repairs: Repairs, local: bool, replay: Path | None) -> dict[str, Any]:
    """Train from where the run stands, with ranks that are started now."""
    with open_run(repairs, local, replay) as run:
        run.validation.before_training(run.life.is_resumed)
        for step in run.life.steps():
            run.logger.log(take_step(run, step), step)
        return finish_run(run)


def take_step(run: Run, step: int) -> dict[str, float]:
    """Take one step of the loop; returns its metrics."""
    batch = run.sampler.next(step)
    score(run.scorers, batch)
    metrics = run.algorithm.add_advantages(batch.rows, step) | update(run, batch.rows, step)
    run.refresh_reference(step)
    run.sampler.load_weights(step)
    metrics |= run.describe(batch)
    return metrics | run.validation.after(step)


def update(run: Run, rows: Batch, step: int) -> dict[str, float]:
    """Update critic and actor for several epochs of mini-batches; metrics are means over optimizer steps."""
    critic, updates = run.roles.critic, dict[str, list[Future[dict[str, float]]]]()
    if critic is not None:
        updates["critic"] = [critic.update(batch) for batch in run.algorithm.critic_batches(rows, step)]
    updates["actor"], metrics = update_actor(run, rows, step)
    for role, futures in updates.items():
        if futures:
            metrics |= run.logger.update_metrics(role, futures)
    return metrics


def update_actor(run: Run, rows: Batch, step: int) -> tuple[list[Future[dict[str, float]]], dict[str, float]]:
    """Start the actor's updates, none while the critic warms up. An update that computes the old log-probs itself is
    waited for, and its comparisons are the metrics.
    """
    actor, algorithm = run.roles.actor, run.algorithm
    if "old_log_probs" not in rows:
        batch, order = algorithm.on_policy_batch(rows, step)
        metrics, log_probs = actor.update_on_policy(batch, run.pretraining.next()).get()
        return [Future.done(metrics)], algorithm.take_old_log_probs(rows, log_probs, order, step)
    if step < run.config.trainer.critic_warmup:
        return [], {}
    return [actor.update(batch, run.pretraining.next()) for batch in algorithm.actor_batches(rows, step)], {}
