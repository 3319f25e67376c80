"""One step's prompts and responses, with their rows, to which every scorer adds columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from megatron_rl.columns import PROMPT_COLUMNS
from megatron_rl.records import Batch, prompts_of
from megatron_rl.scoring.scored_answers import ScoredAnswers


@dataclass
class SampledBatch:
    """Prompts and responses of `step`, B rows.

    rows: prompts with their responses, to which scorers add columns. greedy: one response per group, in the order of
    `records.one_per_group`, if the estimator needs it. scored: the responses' scores, once they are there. metrics: of
    sampling and scoring. requests, greedy_requests: the numbers of the responses in the schedule; empty: it does not
    have them.
    """

    step: int
    rows: Batch
    greedy: Batch | None = None
    scored: ScoredAnswers | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    requests: Sequence[int] = ()
    greedy_requests: Sequence[int] = ()

    def __post_init__(self) -> None:
        groups, failed = self.rows["uid"], self.rows.get("failed")
        if failed is not None:  # nothing is compared with an episode that failed
            _, index, sizes = groups.unique(return_inverse=True, return_counts=True)
            ended = torch.zeros_like(sizes).index_add_(0, index, (~failed).long())
            self.rows.add(lost_peers=~failed & ((sizes > 1) & (ended == 1))[index])
            groups = torch.where(failed, int(groups.max()) + 1 + torch.arange(len(groups)), groups)
        self.rows.add(groups=groups)

    @property
    def prompts(self) -> SimpleNamespace:
        """The prompts for a scorer of the user's: index, sample, uid, data_source and so on as attributes; prompt_ids.

        A column that does not exist is None.
        """
        prompts = prompts_of(self.rows)
        columns = {name: prompts.get(name) for name in PROMPT_COLUMNS}
        return SimpleNamespace(prompt_ids=prompts["input_ids"], **columns)

    @property
    def all_scored(self) -> ScoredAnswers:
        """The scores. Raises ValueError before they are there."""
        if self.scored is None:
            raise ValueError("the batch has no scores yet")
        return self.scored
