"""What the stages before PPO learn from: answers as tokens, alone, ranked, labelled or scored."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowPlace:
    """Where a row stands. row: from 0; JSON lines count what is not blank. line: from 1; None in parquet."""

    file: str
    row: int
    line: int | None = None

    def __str__(self) -> str:
        """As error messages begin."""
        return f"{self.file}: row {self.row}" + (f" (line {self.line})" if self.line is not None else "")


@dataclass(frozen=True, eq=False)
class Example:
    """Some text with what is to be learned in it.

    tokens: int64 [L], L >= 1. loss_mask: bool [L]; where it is True the loss is the cross-entropy of that token, given
    those before it; the first is False, as nothing stands before it. prompt_length: tokens before the first answer that
    counts; 0 where there is no prompt, or it counts, too. where: the file's row.
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
    """Answers to one prompt, the best first; a pair of chosen and rejected is a ranking of two.

    answers: at least 2; their first `prompt_length` tokens are the same, and only tokens after them count. margins: how
    much better each answer is than the next one, one number fewer than there are answers, each at least 0; 0 where the
    file has none. Between any two answers the margin is the sum of those in between (`margin`).
    """

    answers: tuple[Example, ...]
    margins: tuple[float, ...]
    where: RowPlace

    @property
    def prompt_length(self) -> int:
        """Tokens that all answers begin with: their prompt."""
        return self.answers[0].prompt_length

    def margin(self, better: int, worse: int) -> float:
        """How much better answer `better` is than answer `worse`, with better < worse."""
        return sum(self.margins[better:worse])


@dataclass(frozen=True, eq=False)
class Labelled:
    """An answer that is desirable or is not (KTO)."""

    example: Example
    desirable: bool
    where: RowPlace


@dataclass(frozen=True, eq=False)
class ScoredExample:
    """An answer with its score, which a reward model is to give at the last token."""

    example: Example
    score: float
    where: RowPlace
