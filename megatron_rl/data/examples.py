"""Examples of sft, reward and dpo: responses as tokens, alone, ranked, labelled or scored. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.data.row_problems import RowPlace
from megatron_rl.records import Batch, ragged


@dataclass(frozen=True, eq=False)
class Example:
    """A text and the tokens in it that are learned.

    tokens: int64 [L], L >= 1. loss_mask: bool [L]; True: the loss has the cross-entropy of this token, given the tokens
    before it; the first is False, as no token precedes it. prompt_length: tokens before the first response that counts;
    0 without a prompt, and if the prompt counts, too. where: the row of the file.
    """

    tokens: torch.Tensor
    loss_mask: torch.Tensor
    where: RowPlace
    prompt_length: int = 0

    @property
    def num_counted(self) -> int:
        """Tokens in the loss."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, eq=False)
class Ranking:
    """Responses to one prompt, the best first; a pair of chosen and rejected is a ranking of two.

    answers: at least 2; their first `prompt_length` tokens are equal, and only tokens after them count. margins: how
    much better each response is than the next one, one number fewer than there are responses, each at least 0; 0 if the
    file has none. The margin between any two responses is the sum of those in between (`margin`).
    """

    answers: tuple[Example, ...]
    margins: tuple[float, ...]
    where: RowPlace

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt, with which all responses begin."""
        return self.answers[0].prompt_length

    def margin(self, better: int, worse: int) -> float:
        """How much better response `better` is than response `worse`, with better < worse."""
        return sum(self.margins[better:worse])


@dataclass(frozen=True, eq=False)
class Labelled:
    """A response and whether it is desirable (KTO)."""

    example: Example
    desirable: bool
    where: RowPlace


@dataclass(frozen=True, eq=False)
class ScoredExample:
    """A response and its score, which a reward model learns to give at the last token."""

    example: Example
    score: float
    where: RowPlace


def token_batch(examples: Sequence[Example]) -> Batch:
    """The batch of which cross-entropy is computed: the tokens of each example up to the last that counts.

    Raises ValueError for an example without a token that counts.
    """
    rows, masks = [], []
    for example in examples:
        counted = example.loss_mask.nonzero()[:, 0]
        if not len(counted):
            raise ValueError(f"{example.where}: no token counts in the loss")
        end = int(counted[-1]) + 1
        rows.append(example.tokens[:end])
        masks.append(example.loss_mask[:end])
    return Batch(input_ids=ragged(rows), sampled=ragged(masks))
