"""Score finished groups, and give each a verdict (dynamic sampling): whether its responses teach something."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_rl.errors import ConfigError
from megatron_rl.records import Batch
from megatron_rl.sampling.group_map import requests_of_groups
from megatron_rl.sampling.in_flight import InFlightBatches
from megatron_rl.sampling.schedule_types import Verdict
from megatron_rl.sampling.verdicts import GroupVerdicts
from megatron_rl.scoring.batch_scorers import RewardScorer, score
from megatron_rl.scoring.sampled_batch import SampledBatch
from megatron_rl.scoring.scored_answers import ScoredAnswers, join
from megatron_rl.scoring.user_verdict import UserVerdicts, keeps


def differing(scores: Tensor, groups: Tensor) -> Tensor:
    """bool [B]: true for all responses of a group whose scores are not all equal. scores: float [B]; groups: int64 [B],
    equal for the responses to one prompt.

    The others have advantage 0 under every estimator that compares within a group (DAPO: Yu et al., arXiv:2503.14476,
    section 3.2).
    """
    _, index = groups.unique(return_inverse=True)
    num_groups = int(index.max()) + 1
    largest = torch.full((num_groups,), -torch.inf).scatter_reduce(0, index, scores, "amax")
    smallest = torch.full((num_groups,), torch.inf).scatter_reduce(0, index, scores, "amin")
    return (largest > smallest)[index]


Keeps = Callable[[Batch, ScoredAnswers], torch.Tensor]
"""(rows and scores of some groups, B rows) -> bool [B], whether the group of each row is kept."""


class GroupJudge:
    """Gives verdicts to `verdicts`, and keeps the scores of groups until their batch is trained.

    scorer: used by this judge alone, as it may be asked in another thread than the trainer's. size: requests per group.
    """

    def __init__(
        self, keeps: Keeps, scorer: RewardScorer, verdicts: GroupVerdicts, answers: InFlightBatches, size: int
    ) -> None:
        self._keeps, self.scorer, self._verdicts = keeps, scorer, verdicts
        self._answers, self._size = answers, size
        self._scored: dict[int, ScoredAnswers] = {}

    @property
    def needs_ranks(self) -> bool:
        """Whether reward models score too, so that only the trainer's thread can judge, between its steps."""
        return bool(self.scorer.rewards.models or self.scorer.rewards.judges)

    def judge(self, groups: Collection[int] | None = None) -> bool:
        """Score finished groups, wait for it, and give their verdicts; return whether there was one. groups: some of
        those that have none; None: all of them. Raises as `RewardScorer`.
        """
        chosen = sorted(self._verdicts.unjudged if groups is None else groups)
        if not chosen:
            return False
        rows, scored = self._score(chosen)
        kept = self._keeps(rows, scored).tolist()
        for place, group in enumerate(chosen):
            own = torch.arange(place * self._size, (place + 1) * self._size)
            self._scored[group] = scored[own]
            verdict: Verdict = "kept" if kept[place * self._size] else "uniform"
            if all(outcome.failure for outcome in self._scored[group].outcomes):
                verdict = "failed"
            self._verdicts.judged(group, verdict)
        return True

    def judge_scored(self) -> bool:
        """Give the verdicts on finished groups whose scores exist, without waiting for others; return whether there was
        one.
        """
        ready, size = self.scorer.rewards.is_scored, self._size
        return self.judge([group for group in self._verdicts.unjudged if ready(requests_of_groups([group], size))])

    def scores(self, groups: Sequence[int]) -> ScoredAnswers:
        """Return the scores of groups that have a verdict. A checkpoint does not have them: they are made again."""
        missing = [group for group in groups if group not in self._scored]
        if missing:
            scored = self._score(missing)[1]
            for place, group in enumerate(missing):
                self._scored[group] = scored[torch.arange(place * self._size, (place + 1) * self._size)]
        return join([self._scored[group] for group in groups])

    def forget(self, groups: Collection[int]) -> None:
        """Drop the scores of groups."""
        for group in groups:
            self._scored.pop(group, None)

    def _score(self, groups: Sequence[int]) -> tuple[Batch, ScoredAnswers]:
        requests = requests_of_groups(groups, self._size)
        batch = SampledBatch(0, self._answers.rows(requests), requests=requests)
        score([self.scorer], batch)
        return batch.rows, batch.all_scored


def keeps_of(metric: str, user: UserVerdicts | None) -> Keeps:
    """Return the user's verdict; without one, that of DAPO: a group is kept if its values are not all equal.

    metric: score or acc.
    """
    if user is not None:
        return partial(keeps, user)
    return lambda rows, scored: differing(compared(scored, metric), rows["uid"])


def compared(scored: ScoredAnswers, metric: str) -> torch.Tensor:
    """float32 [B]: the values that dynamic sampling compares, score or acc. Raises ConfigError if there is no acc."""
    if metric == "score":
        return scored.scores
    values = scored.variables().get(metric)
    if values is None:
        rule = "needs a reward function: without one a response has a score and no accuracy; try: score"
        raise ConfigError(f"algorithm.filter_groups.metric={metric} {rule}")
    return torch.tensor([0.0 if value is None else value for value in values])
