"""Sample batches: prompts in their order, answers from the rollout, and weights sent to the rollout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatron_rl.config.algorithms import estimator_traits
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.prompt_mixture import MixtureCursor
from megatron_rl.errors import ConfigError
from megatron_rl.experience.assemble import assemble
from megatron_rl.experience.groups import differing, first_groups
from megatron_rl.hybrid_engine.hybrid_engine import TransitionReport
from megatron_rl.observe.phase_clock import PhaseClock
from megatron_rl.records import Batch, Generations, Prompts, Sampling, concatenate, known
from megatron_rl.roles.actor import Actor
from megatron_rl.roles.rollout import Rollout
from megatron_rl.scoring.rewards import Rewards
from megatron_rl.scoring.scored_answers import ScoredAnswers, join

SALT_STRIDE = 1_000_003
"""Difference of the salts of two batches of one step; more than a run has steps."""

FIXED_SALT = -1
"""Validation samples, where they are sampled, use the same seeds every time."""


@dataclass
class SampledBatch:
    """One step's prompts and answers, B rows.

    scored: the scores, if they were needed to choose the answers. greedy: one answer per group, if the estimator needs
    it. metrics: of the sampling itself.
    """

    prompts: Prompts
    generations: Generations
    scored: ScoredAnswers | None
    greedy: Generations | None
    metrics: dict[str, float]

    def experience(self) -> Batch:
        """Prompts and answers joined; the loop fills the other fields as it computes them."""
        return assemble(self.prompts, self.generations)


class SamplingLogger(Protocol):
    """The part of the run's logger that sampling uses."""

    clock: PhaseClock

    def warn(self, message: str) -> None: ...

    def note_transition(self, reports: Sequence[TransitionReport]) -> None: ...


@dataclass(frozen=True)
class Sources:
    """Sources of batches. rollout: None if replicas are called one by one."""

    config: RunConfig
    train_data: PromptDataset
    cursor: MixtureCursor
    rollout: Rollout | None
    rewards: Rewards
    logger: SamplingLogger


class Sampler:
    """Samples batches synchronously. sender: the actor, if the rollout has weights of its own, which it receives."""

    def __init__(self, sources: Sources, sender: Actor | None = None) -> None:
        self.config = sources.config
        self.train_data, self.cursor = sources.train_data, sources.cursor
        self._rollout, self.rewards, self.logger = sources.rollout, sources.rewards, sources.logger
        self._sender = sender
        self.needs_greedy = "greedy_scores" in estimator_traits(sources.config).reads

    @property
    def rollout(self) -> Rollout:
        """The pool of all ranks that generate. Raises ValueError if replicas have pools of their own."""
        if self._rollout is None:
            raise ValueError("the replicas of this rollout are called one by one")
        return self._rollout

    def describe(self) -> dict[str, float]:
        """Metrics of a step's sampling."""
        return {}

    def next(self, step: int) -> SampledBatch:
        """The batch of a step. With `algorithm.filter_groups` batches are drawn until enough groups have scores that
        differ; after `max_num_gen_batches` batches groups with equal scores fill up the step.
        """
        if self.config.algorithm.filter_groups.enable:
            batch = self._filtered(step)
        else:
            prompts = self._next_prompts()
            batch = SampledBatch(prompts, self._training_answers(prompts, salt=step), None, None, {})
        if self.needs_greedy:
            batch.greedy = self.generate(batch.prompts.one_per_group(), self.greedy())
        return batch

    def load_weights(self, step: int) -> None:
        """Send the weights after `step` to the rollout, unless it is in the actor's pool and reads them there."""
        if self._sender is not None:
            sending, receiving = self._sender.send_weights(step), self.rollout.receive_weights()
            self.logger.note_transition(receiving.get())
            sending.get()

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Wrap a checkpoint after `step`: answers of later steps do not change inside."""
        yield

    def write(self, folder: Path, step: int) -> list[str]:
        """Write the answers of steps after `step` to a checkpoint; returns file names. Call inside `saving`."""
        return []

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generations:
        """Answers to all prompt rows. The ranks are in rollout mode only inside this call."""
        return self._generated(prompts, sampling, with_experts=False)

    def _training_answers(self, prompts: Prompts, salt: int) -> Generations:
        return self._generated(prompts, self.sampling(salt), self.config.returns_experts)

    def _generated(self, prompts: Prompts, sampling: Sampling, with_experts: bool) -> Generations:
        reports = self.rollout.enter().get()
        generations = self.rollout.generate(prompts, sampling, with_experts).get()
        self.rollout.exit().get()
        if self._sender is None:
            self.logger.note_transition(reports)
        return generations

    def sampling(self, salt: int) -> Sampling:
        """Sampling parameters of training."""
        rollout = self.config.actor_rollout_ref.rollout
        return Sampling(rollout.temperature, rollout.top_p, rollout.top_k, self.config.data.max_response_length, salt)

    def greedy(self) -> Sampling:
        """Sampling parameters of greedy baseline answers, where the seed has no effect."""
        return Sampling(0.0, 1.0, -1, self.config.data.max_response_length, FIXED_SALT)

    def val_sampling(self) -> Sampling:
        """Sampling parameters of validation: greedy unless `val_kwargs.do_sample`."""
        kwargs = self.config.actor_rollout_ref.rollout.val_kwargs
        if not kwargs.do_sample:
            return self.greedy()
        longest = self.config.data.max_response_length
        return Sampling(kwargs.temperature, kwargs.top_p, kwargs.top_k, longest, FIXED_SALT)

    def _next_prompts(self, cursor: MixtureCursor | None = None) -> Prompts:
        """The next training prompts, each `rollout.n` times. cursor: None: the run's own."""
        indices = (cursor or self.cursor).next_indices()
        return self.train_data.batch(indices).repeat(self.config.batch_sizes.samples_per_prompt)

    def _filtered(self, step: int) -> SampledBatch:
        wanted, most = self.config.batch_sizes.num_prompts, self.config.algorithm.filter_groups.max_num_gen_batches
        batches: list[tuple[Prompts, Generations, ScoredAnswers]] = []
        while True:
            prompts = self._next_prompts()
            # Group numbers are unique over all batches.
            prompts.uid = known(prompts.uid) + sum(len(earlier) for earlier, _, _ in batches)
            generations = self._training_answers(prompts, salt=step + SALT_STRIDE * len(batches))
            pending = self.rewards.start(prompts, generations)
            batches.append((prompts, generations, self.rewards.training_scores(prompts, generations, pending)))
            prompts = concatenate([part for part, _, _ in batches])
            generations = concatenate([part for _, part, _ in batches])
            groups = known(prompts.uid)
            scored = join([part for _, _, part in batches])
            differ = differing(compared(scored, self.config.algorithm.filter_groups.metric), groups)
            num_differing = len(groups[differ].unique())
            if num_differing >= wanted or len(batches) == most:
                rows = first_groups(groups, differ, wanted)
                metrics = {
                    "train/num_gen_batches": float(len(batches)),
                    "train/differing_groups": min(num_differing, wanted) / wanted,
                }
                return SampledBatch(prompts[rows], generations[rows], scored[rows], None, metrics)


def compared(scored: ScoredAnswers, metric: str) -> torch.Tensor:
    """float32 [B]: the values that dynamic sampling compares, score or acc. Raises ConfigError if there is no acc."""
    if metric == "score":
        return scored.scores
    values = scored.variables().get(metric)
    if values is None:
        rule = "needs a rule: without one an answer has a score and no accuracy; nearest: score"
        raise ConfigError(f"algorithm.filter_groups.metric={metric} {rule}")
    return torch.tensor([0.0 if value is None else value for value in values])
