"""PPO, from prompts to new weights: one straight loop on the controller, every method visible.

    prompts -> generate -> log-probs, values, rewards -> advantages -> update critic, actor -> reshard

Other algorithms use this loop with another estimator or loss, without the roles that they do not need.
Methods of roles run on every rank of the role's pool and return futures; `.get()` waits. Independent calls are started
before any of them is waited for, so that roles in different pools run at the same time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.columns import ACTOR_SCORES, SCORING
from megatron_rl.config.algorithms import bypasses, scores_old_log_probs
from megatron_rl.config.schema import RunConfig
from megatron_rl.controller.report import finish_run
from megatron_rl.controller.run import Run, open_run
from megatron_rl.dispatch import Future
from megatron_rl.records import Batch
from megatron_rl.sampling.sampler import SampledBatch


def train(config: RunConfig, local: bool = False, replay: Path | None = None) -> dict[str, Any]:
    """Run PPO as configured and return the summary that is also written to `summary.json`.

    Resumes from the newest checkpoint, or as `trainer.resume_mode` says. local: one rank, all roles in this process.
    replay: the folder of a run whose recorded schedule of generation is repeated.
    Raises MegatronRLError if a rank or a reward function fails, or a signal asks the run to stop. No process is left.
    """
    with open_run(config, local, replay) as run:
        run.validation.before_training(run.life.is_resumed)
        for step in run.life.steps():
            run.logger.log(take_step(run, step), step)
        return finish_run(run)


def take_step(run: Run, step: int) -> dict[str, float]:
    """Take one step of the loop; returns its metrics."""
    batch = run.sampler.next(step)
    experience = score(run, batch, step)
    metrics = run.algorithm.add_advantages(experience, step) | update(run, experience, step)
    run.sampler.load_weights(step)
    metrics |= run.describe(batch, experience, step)
    return metrics | run.validation.after(step)


def score(run: Run, batch: SampledBatch, step: int) -> Batch:
    """Score a batch with every role and reward. Old log-probs are skipped if the update computes them itself."""
    roles, rewards, algorithm = run.roles, run.rewards, run.algorithm
    prompts, generations, greedy = batch.prompts, batch.generations, batch.greedy
    experience = batch.experience()
    sequences, with_experts = experience.read_by(SCORING), experience.read_by(ACTOR_SCORES)
    old_log_probs = roles.actor.log_probs(with_experts) if scores_old_log_probs(run.config) else None
    unreplayed = roles.actor.log_probs_without_replay(sequences) if algorithm.compares_replay(step) else None
    ref_log_probs = roles.reference.log_probs(sequences) if roles.reference is not None else None
    old_values = roles.critic.values(sequences) if roles.critic is not None else None
    # Last, because conversations may have to be tokenised for reward models first.
    pending = rewards.start(prompts, generations) if batch.scored is None else []
    greedy_pending = rewards.start(prompts.one_per_group(), greedy) if greedy is not None else []
    if batch.scored is None:
        batch.scored = rewards.training_scores(prompts, generations, pending)
    experience.add(scores=batch.scored.scores, components=rewards.components(batch.scored))
    if greedy is not None:
        experience.add(greedy_scores=rewards.greedy_scores(prompts, greedy, greedy_pending))
    if bypasses(run.config):
        experience.add(old_log_probs=experience["rollout_log_probs"])
    elif old_log_probs is not None:
        batch.metrics |= algorithm.take_scores(experience, old_log_probs.get())
    if unreplayed is not None:
        batch.metrics |= algorithm.compare_unreplayed(experience, unreplayed.get())
    if ref_log_probs is not None:
        experience.add(ref_log_probs.get())
    if old_values is not None:
        experience.add(old_values.get())
    return experience


def update(run: Run, experience: Batch, step: int) -> dict[str, float]:
    """Update critic and actor for several epochs of mini-batches; metrics are means over optimizer steps."""
    roles, algorithm = run.roles, run.algorithm
    metrics: dict[str, float] = {}
    critic_updates, actor_updates = list[Future[dict[str, float]]](), list[Future[dict[str, float]]]()
    if roles.critic is not None:
        critic_updates = [roles.critic.update(batch) for batch in algorithm.critic_batches(experience, step)]
    if "old_log_probs" not in experience:
        batch, rows = algorithm.on_policy_batch(experience, step)
        actor_metrics, log_probs = roles.actor.update_on_policy(batch, run.pretraining.next()).get()
        metrics |= algorithm.take_old_log_probs(experience, log_probs, rows, step)
        actor_updates = [Future.done(actor_metrics)]
    elif step >= run.config.trainer.critic_warmup:
        batches = algorithm.actor_batches(experience, step)
        actor_updates = [roles.actor.update(batch, run.pretraining.next()) for batch in batches]
    if critic_updates:
        metrics |= run.logger.update_metrics("critic", critic_updates)
    if actor_updates:
        metrics |= run.logger.update_metrics("actor", actor_updates)
    return metrics
