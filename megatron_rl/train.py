"""PPO, from prompts to new weights: one straight loop on the controller, every verb visible.

    prompts -> generate -> log-probs, values, rewards -> advantages -> update critic, actor -> reshard

Verbs of `workers` run on every rank and return futures; `.get()` waits. Ranks find the current weights in their
rollout engine because `enter_rollout` brings what each one lacks.
"""

from __future__ import annotations

from megatron_rl.checkpoints import Checkpoints
from megatron_rl.config.schema import RunConfig
from megatron_rl.controller.resource_pool import ResourcePool
from megatron_rl.controller.signals import graceful_signals
from megatron_rl.controller.worker_group import WorkerGroup
from megatron_rl.experience.assemble import add_advantages, add_rewards, assemble
from megatron_rl.experience.batches import mini_batch_rows
from megatron_rl.records import Experience, Generations, Prompts, Sampling
from megatron_rl.report import finish_run
from megatron_rl.run import Run, is_validation_step, stop_grace_s
from megatron_rl.workers.environment import worker_environment
from megatron_rl.workers.rank_worker import RankWorker


def train(config: RunConfig) -> dict:
    """Run PPO as configured and return the summary that is also written to `summary.json`.

    Goes on from the newest checkpoint, or as `trainer.resume_mode` says. Raises a MegatronRLError, and leaves no
    process behind, whatever goes wrong in a worker or a reward function, and when a signal asks it to stop.
    """
    trainer = config.trainer
    pool = ResourcePool(trainer.nnodes, trainer.n_gpus_per_node, trainer.device)
    workers = WorkerGroup(pool, RankWorker, config, env=worker_environment(trainer.device, trainer.n_gpus_per_node))
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
    """Actor, reference, critic, and the rollout engine on the actor's memory."""
    for name in ("actor", "reference", "critic", "rollout"):
        with run.phase(f"build {name}"):
            getattr(workers, f"build_{name}")().get()


def ppo_step(run: Run, workers: WorkerGroup, step: int) -> dict[str, float]:
    """One batch of prompts, from sampling to updated weights; returns the step's metrics."""
    algorithm, phase = run.config.algorithm, run.phase
    with phase("step"):
        # Rollout
        run.abandon_step_if_late()
        prompts = run.next_prompts()
        generations = generate(run, workers, prompts, run.sampling(salt=step))

        run.abandon_step_if_late()

        # Experience: the workers score tokens while the rules score answers here
        experience = assemble(prompts, generations)
        sequences = experience.sequences()
        old_log_probs = workers.compute_log_probs(sequences)
        ref_log_probs = workers.compute_ref_log_probs(sequences)
        old_values = workers.compute_values(sequences)
        with phase("reward"):
            scored = run.reward(prompts, generations)
            experience.scores = scored.scores
        with phase("old_log_prob"):
            experience.old_log_probs = old_log_probs.get().scores
        with phase("ref"):
            experience.ref_log_probs = ref_log_probs.get().scores
        with phase("values"):
            experience.old_values = old_values.get().scores
        parity = run.check_rollout_parity(experience)
        with phase("adv"):
            kl_coef = run.kl_ctrl.coef if algorithm.use_kl_in_reward else 0.0
            kl = add_rewards(experience, kl_coef)
            run.kl_ctrl.update(float(kl), len(experience))
            add_advantages(experience, algorithm.gamma, algorithm.lam)

        # Update, which is not given up half done
        run.abandon_step_if_late()
        with phase("update_critic"):
            critic_metrics = update_critic(run, workers, experience, step)
        with phase("update_actor"):
            actor_metrics = update_actor(run, workers, experience, step)
    penalty = {"actor/reward_kl_penalty": float(kl), "actor/reward_kl_penalty_coeff": kl_coef}
    run.save_samples(run.config.trainer.rollout_data_dir, prompts, scored, step)
    metrics = run.data_metrics(prompts, generations, experience) | scored.metrics() | run.take_timings()
    return metrics | parity | penalty | critic_metrics | actor_metrics


def generate(run: Run, workers: WorkerGroup, prompts: Prompts, sampling: Sampling) -> Generations:
    """Answers to all prompt rows; the ranks are in rollout mode only inside this call."""
    with run.phase("reshard"):
        run.note_transition(workers.enter_rollout().get())
    with run.phase("gen"):
        generations = workers.generate(prompts, sampling).get()
    with run.phase("reshard"):
        workers.exit_rollout().get()
    return generations


def update_critic(run: Run, workers: WorkerGroup, experience: Experience, step: int) -> dict[str, float]:
    """Several epochs of mini-batches through the critic's optimizer; metrics averaged over the updates."""
    batch = experience.critic_batch()
    return run.mean_metrics(
        workers.update_critic(batch[rows]).get()
        for rows in mini_batch_rows(len(experience), *run.mini_batching(run.config.critic, step))
    )


def update_actor(run: Run, workers: WorkerGroup, experience: Experience, step: int) -> dict[str, float]:
    """Several epochs of mini-batches through the actor's optimizer; metrics averaged over the updates."""
    batch = experience.actor_batch()
    return run.mean_metrics(
        workers.update_actor(batch[rows]).get()
        for rows in mini_batch_rows(len(experience), *run.mini_batching(run.config.actor_rollout_ref.actor, step))
    )


def validate(run: Run, workers: WorkerGroup, step: int) -> dict[str, float]:
    """Answer every held-out prompt, `val_kwargs.n` times; metrics per data source, under verl's names."""
    with run.phase("testing"):
        prompts = run.val_prompts()
        generations = generate(run, workers, prompts, run.val_sampling())
        scored = run.reward(prompts, generations)
        run.save_samples(run.config.trainer.validation_data_dir, prompts, scored, step)
        metrics = run.val_metrics(prompts, generations, scored)
    return metrics | run.take_timings("timing_s/testing")
