"""Prompts in, samples out: one batch of them, or with dynamic sampling as many as it takes."""

from __future__ import annotations

import torch

from megatron_rl.cluster.worker_group import Future, WorkerGroup
from megatron_rl.experience.assemble import assemble
from megatron_rl.experience.groups import differing, first_groups
from megatron_rl.records import Generations, Prompts, Sampling
from megatron_rl.reward.rule import Scored, join
from megatron_rl.run import Run

SALT_STRIDE = 1_000_003
"""Between the seeds of two batches of one step; more than a run has steps."""


def generate(run: Run, workers: WorkerGroup, prompts: Prompts, sampling: Sampling) -> Generations:
    """Answers to all prompt rows; the ranks are in rollout mode only inside this call."""
    with run.phase("reshard"):
        run.note_transition(workers.enter_rollout().get())
    with run.phase("gen"):
        generations = workers.generate(prompts, sampling).get()
    with run.phase("reshard"):
        workers.exit_rollout().get()
    return generations


def start_rm_scores(run: Run, workers: WorkerGroup, prompts: Prompts, generations: Generations) -> Future | None:
    """Have the reward model score answers, beside whatever else happens; None where there is no reward model."""
    if not run.has_reward_model:
        return None
    return workers.compute_rm_scores(assemble(prompts, generations).sequences())


def sample(run: Run, workers: WorkerGroup, step: int) -> tuple[Prompts, Generations, Scored | None]:
    """One step's prompts and answers, and their scores where those had to be known to choose them.

    With `algorithm.filter_groups` batches are drawn until enough groups have scores that differ; after
    `max_num_gen_batches` the step is filled up with groups that have equal ones.
    """
    if not run.config.algorithm.filter_groups.enable:
        prompts = run.next_prompts()
        return prompts, generate(run, workers, prompts, run.sampling(salt=step)), None
    wanted, most = run.config.data.train_batch_size, run.config.algorithm.filter_groups.max_num_gen_batches
    batches: list[tuple[Prompts, Generations, Scored]] = []
    while True:
        prompts = run.next_prompts()
        # Groups are told apart over all batches.
        prompts.uid = prompts.uid + sum(len(earlier) for earlier, _, _ in batches)
        generations = generate(run, workers, prompts, run.sampling(salt=step + SALT_STRIDE * len(batches)))
        with run.phase("reward"):
            rm_scores = start_rm_scores(run, workers, prompts, generations)
            batches.append((prompts, generations, run.scored(prompts, generations, rm_scores)))
        prompts, generations = (torch.cat(parts) for parts in list(zip(*batches, strict=True))[:2])
        scored = join([part for _, _, part in batches])
        differ = differing(scored.scores, prompts.uid)
        num_differing = len(prompts.uid[differ].unique())
        if num_differing >= wanted or len(batches) == most:
            run.note_sampling(len(batches), min(num_differing, wanted) / wanted)
            rows = first_groups(prompts.uid, differ, wanted)
            return prompts[rows], generations[rows], scored[rows]
        run.abandon_step_if_late()
