"""Dynamic sampling: generate batches until enough groups have scores that differ."""

from __future__ import annotations

import torch

from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.experience.groups import differing, first_groups
from megatron_rl.records import Batch, Prompts
from megatron_rl.roles.actor import Actor
from megatron_rl.roles.rollout import Rollout
from megatron_rl.sampling.pool_sampler import PoolSampler
from megatron_rl.sampling.sampler import Schedule, Sources
from megatron_rl.scoring.batch_scorers import score
from megatron_rl.scoring.sampled_batch import SampledBatch
from megatron_rl.scoring.scored_answers import ScoredAnswers, join
from megatron_rl.scoring.user_verdict import keeps

SALT_STRIDE = 1_000_003
"""Difference of the salts of two batches of one step; more than a run has steps."""


class GroupFilter(PoolSampler):
    """Sample as `algorithm.filter_groups` says. Every batch is generated outside of the schedule, and scored at
    once."""

    def __init__(self, schedule: Schedule, sources: Sources, rollout: Rollout, sender: Actor | None = None) -> None:
        super().__init__(schedule, sources, rollout, sender)
        self.scorer, self.verdicts = sources.scorer, sources.verdicts

    def next(self, step: int) -> SampledBatch:
        """The batch of a step, with scores. After `max_num_gen_batches` batches groups with equal scores fill it up."""
        batch = self._filtered(step)
        if self.needs_greedy:
            batch.greedy = self.answer(batch.prompts.one_per_group(), self.greedy())[1]
        return batch

    def _filtered(self, step: int) -> SampledBatch:
        wanted, keys = self.config.batch_sizes.num_prompts, self.config.algorithm.filter_groups
        batches: list[SampledBatch] = []
        kept: list[torch.Tensor] = []
        while True:
            batches.append(self._scored_batch(step, batches))
            kept.append(self._kept(batches[-1]))
            prompts = Prompts.joined([batch.prompts for batch in batches])
            scored, groups, differ = join([batch.all_scored for batch in batches]), prompts.uid, torch.cat(kept)
            num_differing = len(groups[differ].unique())
            if num_differing >= wanted or len(batches) == keys.max_num_gen_batches:
                break
            self._check_kept(num_differing, len(groups.unique()), len(batches))
        if num_differing < wanted and step == self.rules.first_step:
            share = share_text(num_differing, len(groups.unique()), len(batches))
            self.logger.warn(f"{share}: groups that are not kept fill up the {wanted} of the step")
        rows = first_groups(groups, differ, wanted)
        metrics = {
            "train/num_gen_batches": float(len(batches)),
            "train/differing_groups": min(num_differing, wanted) / wanted,
        }
        metrics |= {} if self.verdicts is None else self.verdicts.metrics()
        answers = Batch.joined([batch.rows for batch in batches])
        self.keep(step, prompts, answers)
        return SampledBatch(step, prompts[rows], answers[rows], scored=scored[rows], metrics=metrics)

    def _scored_batch(self, step: int, earlier: list[SampledBatch]) -> SampledBatch:
        """One more batch of a step, with scores. Its group numbers and seeds are none of an earlier one's."""
        prompts = self.next_prompts(self.cursor)
        prompts.uid = prompts.uid + sum(len(batch.prompts) for batch in earlier)
        sampling = self.sampling(step + SALT_STRIDE * len(earlier))
        batch = SampledBatch(step, *self.answer(prompts, sampling, step))
        score([self.scorer], batch)
        return batch

    def _kept(self, batch: SampledBatch) -> torch.Tensor:
        """bool [B]: whether the group of each response is kept, by the user's function or as its values differ."""
        if self.verdicts is not None:
            return keeps(self.verdicts, batch.prompts, batch.rows, batch.all_scored)
        metric = self.config.algorithm.filter_groups.metric
        return differing(compared(batch.all_scored, metric), batch.prompts.uid)

    def _check_kept(self, num_kept: int, num_groups: int, num_batches: int) -> None:
        """Raise RewardError where nothing bounds the batches and no group of all training prompts is kept."""
        keys, key = self.config.algorithm.filter_groups, "algorithm.filter_groups.max_num_gen_batches"
        if keys.max_num_gen_batches == 0 and num_kept == 0 and num_groups >= len(self.train_data):
            raise RewardError(
                f"{share_text(0, num_groups, num_batches)}, which have every training prompt: no step can be filled; "
                f"try: {key}={num_batches}, or another reward function or filter"
            )


def share_text(num_kept: int, num_groups: int, num_batches: int) -> str:
    """Return the share of groups that dynamic sampling has kept."""
    share = num_kept / num_groups
    return f"dynamic sampling keeps {num_kept} of {num_groups} groups ({share:.1%}) in {num_batches} batches"


def compared(scored: ScoredAnswers, metric: str) -> torch.Tensor:
    """float32 [B]: the values that dynamic sampling compares, score or acc. Raises ConfigError if there is no acc."""
    if metric == "score":
        return scored.scores
    values = scored.variables().get(metric)
    if values is None:
        rule = "needs a reward function: without one a response has a score and no accuracy; try: score"
        raise ConfigError(f"algorithm.filter_groups.metric={metric} {rule}")
    return torch.tensor([0.0 if value is None else value for value in values])
