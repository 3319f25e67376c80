"""PPO, from prompts to new weights: one straight loop on the controller, every verb visible.

    prompts -> generate -> log-probs, values, rewards -> advantages -> update critic, actor -> reshard

Other algorithms are the same loop: another estimator or loss by its name, without the roles that it does not need.
Verbs of `workers` run on every rank and return futures; `.get()` waits. Ranks find the current weights in their
rollout engine because `enter_rollout` brings what each one lacks.
"""

from __future__ import annotations

from megatron_rl.checkpoints import Checkpoints
from megatron_rl.cluster.resource_pool import ResourcePool
from megatron_rl.cluster.signals import graceful_signals
from megatron_rl.cluster.worker_group import WorkerGroup
from megatron_rl.config.schema import RunConfig
from megatron_rl.experience.assemble import add_advantages, add_rollout_correction, assemble
from megatron_rl.experience.batches import mini_batch_rows
from megatron_rl.records import Experience
from megatron_rl.report import finish_run
from megatron_rl.roles.cuts import sequence_work
from megatron_rl.roles.environment import worker_environment
from megatron_rl.roles.rank_worker import RankWorker
from megatron_rl.run import Run, is_validation_step, stop_grace_s, watch_limits
from megatron_rl.sampling import generate, sample, start_rm_scores


def train(config: RunConfig) -> dict:
    """Run PPO as configured and return the summary that is also written to `summary.json`.

    Goes on from the newest checkpoint, or as `trainer.resume_mode` says. Raises a MegatronRLError, and leaves no
    process behind, whatever goes wrong in a worker or a reward function, and when a signal asks it to stop.
    """
    trainer = config.trainer
    pool = ResourcePool(trainer.nnodes, trainer.n_gpus_per_node, trainer.device)
    env = worker_environment(trainer.device, trainer.n_gpus_per_node)
    work = sequence_work(config.actor_rollout_ref.model.path) if trainer.balance_batch else None
    limits = watch_limits(config)
    workers = WorkerGroup(pool, RankWorker, config, limits.collective_timeout, env=env, work=work, limits=limits)
    with graceful_signals(stop_grace_s(trainer)) as stop, Run(config, stop) as run, pool, workers:
        build_roles(run, workers)
        checkpoints = Checkpoints(run, workers)
        checkpoints.restore()
        if trainer.val_before_train and run.start.path is None:
            run.log(validate(run, workers, step=0), step=0)
        for step in run.steps():
            with checkpoints.around(step):
                metrics = ppo_step(run, workers, step)
                if is_validation_step(trainer, step) and not stop.is_set:
                    metrics |= validate(run, workers, step)
                run.log(metrics, step)
        checkpoints.settle()
        if run.parity_rows is None:  # every step had been taken before
            validate(run, workers, trainer.total_training_steps)
        return finish_run(run, workers)


def build_roles(run: Run, workers: WorkerGroup) -> None:
    """Actor; reference, critic and reward model where there are such; the rollout engine on the actor's memory."""
    optional = {"reference": run.has_reference, "critic": run.has_critic, "reward_model": run.has_reward_model}
    for name in ("actor", "reference", "critic", "reward_model", "rollout"):
        if optional.get(name, True):
            with run.phase(f"build {name}"):
                getattr(workers, f"build_{name}")().get()


def ppo_step(run: Run, workers: WorkerGroup, step: int) -> dict[str, float]:
    """One batch of prompts, from sampling to updated weights; returns the step's metrics."""
    algorithm, phase = run.config.algorithm, run.phase
    metrics: dict[str, float] = {}
    with phase("step"):
        # Rollout
        run.abandon_step_if_late()
        prompts, generations, scored = sample(run, workers, step)
        questions = prompts.one_per_group()
        greedy = generate(run, workers, questions, run.greedy()) if run.needs_greedy else None

        run.abandon_step_if_late()

        # Experience: the workers score answers and tokens while the rules score answers here
        rm_scores = start_rm_scores(run, workers, prompts, generations) if scored is None else None
        greedy_rm_scores = start_rm_scores(run, workers, questions, greedy) if greedy is not None else None
        experience = assemble(prompts, generations)
        sequences = experience.sequences()
        old_log_probs = workers.compute_log_probs(sequences)
        ref_log_probs = workers.compute_ref_log_probs(sequences) if run.has_reference else None
        old_values = workers.compute_values(sequences) if run.has_critic else None
        with phase("reward"):
            scored = run.scored(prompts, generations, rm_scores) if scored is None else scored
            experience.scores = scored.scores
            if greedy is not None:
                experience.greedy_scores = run.greedy_scores(prompts, greedy, greedy_rm_scores)
        with phase("old_log_prob"):
            experience.old_log_probs = old_log_probs.get().scores
        if ref_log_probs is not None:
            with phase("ref"):
                experience.ref_log_probs = ref_log_probs.get().scores
        if old_values is not None:
            with phase("values"):
                experience.old_values = old_values.get().scores
        metrics |= run.check_rollout_parity(experience)
        with phase("adv"):
            metrics |= add_rollout_correction(experience, algorithm.rollout_correction)
            metrics |= run.penalise_kl(experience)
            add_advantages(experience, run.estimator, algorithm)

        # Update, which is not given up half done
        run.abandon_step_if_late()
        if run.has_critic:
            with phase("update_critic"):
                metrics |= update_critic(run, workers, experience, step)
        with phase("update_actor"):
            metrics |= update_actor(run, workers, experience, step)
    run.save_samples(run.config.trainer.rollout_data_dir, prompts, scored, step)
    metrics |= run.memory_metrics(workers.take_memory().get())
    return metrics | run.data_metrics(prompts, generations, experience) | scored.metrics() | run.take_timings()


def update_critic(run: Run, workers: WorkerGroup, experience: Experience, step: int) -> dict[str, float]:
    """Several epochs of mini-batches through the critic's optimizer; metrics averaged over the updates taken."""
    batch = experience.critic_batch()
    mini_batches = mini_batch_rows(len(experience), *run.mini_batching(run.config.critic, step))
    return run.update_metrics("critic", (workers.update_critic(batch[rows]).get() for rows in mini_batches))


def update_actor(run: Run, workers: WorkerGroup, experience: Experience, step: int) -> dict[str, float]:
    """Several epochs of mini-batches through the actor's optimizer; metrics averaged over the updates taken."""
    batch = experience.actor_batch(run.config.actor_rollout_ref.actor.use_kl_loss)
    mini_batches = mini_batch_rows(len(experience), *run.mini_batching(run.config.actor_rollout_ref.actor, step))
    return run.update_metrics("actor", (workers.update_actor(batch[rows]).get() for rows in mini_batches))


def validate(run: Run, workers: WorkerGroup, step: int) -> dict[str, float]:
    """Answer every held-out prompt, `val_kwargs.n` times; metrics per data source, under verl's names."""
    with run.phase("testing"):
        prompts = run.val_prompts()
        generations = generate(run, workers, prompts, run.val_sampling())
        scored = run.reward(prompts, generations, start_rm_scores(run, workers, prompts, generations))
        run.save_samples(run.config.trainer.validation_data_dir, prompts, scored, step)
        metrics = run.val_metrics(prompts, generations, scored)
    return metrics | run.take_timings("timing_s/testing")
