"""One step's prompts and responses, with their rows, to which every scorer adds columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_rl.records import Batch, Prompts
from megatron_rl.scoring.scored_answers import ScoredAnswers


@dataclass
class SampledBatch:
    """Prompts and responses of `step`, B rows.

    rows: prompts with their responses, to which scorers add columns. greedy: one response per group, in the order of
    `one_per_group`, if the estimator needs it. scored: the responses' scores, once they are there. metrics: of sampling
    and scoring. requests, greedy_requests: the numbers of the responses in the schedule; empty: it does not have them.
    """

    step: int
    prompts: Prompts
    rows: Batch
    greedy: Batch | None = None
    scored: ScoredAnswers | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    requests: Sequence[int] = ()
    greedy_requests: Sequence[int] = ()

    def __post_init__(self) -> None:
        groups, failed = self.prompts.uid, self.rows.get("failed")
        if failed is not None:  # nothing is compared with an episode that failed
            _, index, sizes = groups.unique(return_inverse=True, return_counts=True)
            ended = torch.zeros_like(sizes).index_add_(0, index, (~failed).long())
            self.rows.add(lost_peers=~failed & ((sizes > 1) & (ended == 1))[index])
            groups = torch.where(failed, int(groups.max()) + 1 + torch.arange(len(groups)), groups)
        self.rows.add(groups=groups)

    @property
    def all_scored(self) -> ScoredAnswers:
        """The scores. Raises ValueError before they are there."""
        if self.scored is None:
            raise ValueError("the batch has no scores yet")
        return self.scored
