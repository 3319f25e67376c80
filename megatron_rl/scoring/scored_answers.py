"""Scores of a batch of responses: the reward function's and those of reward models, separate and combined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_rl.errors import RewardError
from megatron_rl.scoring.outcome import FAILURES, Outcome, Sample, describe, name_apart
from megatron_rl.scoring.shaping import Shaped

FIRST_MODEL, FIRST_NAME = "reward_model", "rm_score"
"""The reward model of verl's keys and the name of its score. The score of another model is its name with "_score"."""


@dataclass(frozen=True)
class ScoredAnswers:
    """The scores of B responses, float32 [B]; a sample that the rule could not score has the configured score.

    outcomes: the rule's. An outcome has neither a score nor a failure where there is no reward function. turns: what
    the scores have of process reward models, float32 [sampled tokens] of each response; None without such a model.
    """

    scores: torch.Tensor
    samples: list[Sample]
    outcomes: list[Outcome]
    first_failure: str | None
    turns: list[torch.Tensor] | None = None

    def __getitem__(self, rows: torch.Tensor) -> ScoredAnswers:
        """Select the responses with these row numbers, int64 [b]."""
        numbers = rows.tolist()
        samples, outcomes = ([column[row] for row in numbers] for column in (self.samples, self.outcomes))
        turns = None if self.turns is None else [self.turns[row] for row in numbers]
        return ScoredAnswers(self.scores[rows], samples, outcomes, self.first_failure, turns)

    def metrics(self) -> dict[str, float]:
        """Count failed samples by kind and as a share; average each extra number over the samples that have it."""
        metrics = {}
        if any(outcome.failure or outcome.score is not None for outcome in self.outcomes):
            kinds = Counter(outcome.failure for outcome in self.outcomes)
            metrics = {"reward/failed_ratio": 1 - kinds[""] / len(self.outcomes)}
            metrics |= {f"reward/{kind}": float(kinds[kind]) for kind in FAILURES}
        for name, values in self._extras(float).items():
            known = [value for value in values if value is not None]
            metrics[f"reward/{name}/mean"] = sum(known) / len(known)
        return metrics

    def variables(self) -> dict[str, list[float | None]]:
        """Return the columns of validation, one value per row: "reward", "acc" and each extra number.

        A response whose result has no "acc" takes the rule's score for it; without a rule there is no column "acc". A
        failed sample has acc 0 and None in the extra columns.
        """
        extras = self._extras(float)
        given = extras.pop("acc", [None] * len(self.outcomes))
        rows = zip(given, self.outcomes, strict=True)
        accuracies = [0.0 if outcome.failure else outcome.score if acc is None else acc for acc, outcome in rows]
        known = {} if None in accuracies else {"acc": accuracies}
        return {**known, "reward": self.scores.tolist(), **extras}

    def numbers(self, key: str, failed: float) -> list[float]:
        """Return each response's number under `key`, from the rule or a reward model; `failed` where the rule failed.

        Raises RewardError, naming the first response that does not have the number.
        """
        column = []
        for outcome, sample in zip(self.outcomes, self.samples, strict=True):
            entries = {"score": outcome.score, **outcome.extras}
            value = entries.get(name_apart(key) if name_apart(key) in entries else key)
            if type(value) is not float:
                if not outcome.failure:
                    names = ", ".join(sorted(name for name, other in entries.items() if type(other) is float))
                    raise RewardError(
                        f"algorithm.gdpo_reward_keys names {key}, of which the reward function must return a number "
                        f"in its dict; it returned only {names or 'none'} of {describe(sample)}"
                    )
                value = failed
            column.append(value)
        return column

    def predictions(self) -> list[str | None]:
        """Return each response as the reward function understood it, its "pred"; None if the result has none."""
        return self._extras(str).get("pred", [None] * len(self.outcomes))

    def table(self, questions: list[str], step: int) -> list[dict[str, Any]]:
        """Return the rows of a sample table, under verl's names, with data source and failure."""
        rows = zip(questions, self.samples, self.scores.tolist(), self.outcomes, strict=True)
        return [
            {"input": question, "output": sample.solution, "gts": sample.ground_truth, "score": score, "step": step}
            | {"data_source": sample.data_source, "failure": outcome.failure}
            | outcome.extras
            for question, sample, score, outcome in rows
        ]

    def _extras(self, kind: type) -> dict[str, list[Any]]:
        """Name -> value per row, of the extras of one type; None if a row does not have it."""
        names = {name for outcome in self.outcomes for name, value in outcome.extras.items() if type(value) is kind}
        columns = {name: [outcome.extras.get(name) for outcome in self.outcomes] for name in sorted(names)}
        return {name: [v if type(v) is kind else None for v in column] for name, column in columns.items()}


def join(parts: Sequence[ScoredAnswers]) -> ScoredAnswers:
    """Concatenate batches of scored responses."""
    return ScoredAnswers(
        torch.cat([part.scores for part in parts]),
        [sample for part in parts for sample in part.samples],
        [outcome for part in parts for outcome in part.outcomes],
        next((part.first_failure for part in parts if part.first_failure is not None), None),
        None if parts[0].turns is None else [turns for part in parts for turns in part.turns or ()],
    )


@dataclass(frozen=True)
class ModelScores:
    """The scores that one reward model gives B responses, float32 [B], and their weight in the sum.

    is_cut: bool [B], True where the model does not read the end of a conversation; None if it reads the actor's
    tokens. shaped: rewards that training takes instead of the scores; None: training takes the scores. rows: int64 [B],
    the numbers of these responses in the batch; None if the model scores the whole batch. texts, counts: name -> what
    else is logged of each response, such as the text of a judge and its further attempts. turns: ragged
    float32 [B, (N)], the parts of a process reward model's scores on the tokens that end turns and steps.
    """

    name: str
    scores: torch.Tensor
    weight: float
    is_cut: torch.Tensor | None = None
    shaped: Shaped | None = None
    rows: torch.Tensor | None = None
    texts: Mapping[str, list[str]] = field(default_factory=dict)
    counts: Mapping[str, list[float]] = field(default_factory=dict)
    turns: torch.Tensor | None = None

    @property
    def all_rows(self) -> torch.Tensor:
        """int64 [B]: the responses' numbers in the batch."""
        return torch.arange(len(self.scores)) if self.rows is None else self.rows

    @property
    def rewards(self) -> torch.Tensor:
        """float32 [B]: the values that the weight multiplies."""
        return self.scores if self.shaped is None else self.shaped.rewards

    @property
    def columns(self) -> dict[str, list[float] | list[str]]:
        """Name -> the value logged for each response."""
        label = FIRST_NAME if self.name == FIRST_MODEL else f"{self.name}_score"
        short = label.removesuffix("_score")
        columns: dict[str, list[float] | list[str]] = {label: self.scores.tolist()}
        columns |= {f"{short}_{name}": texts for name, texts in self.texts.items()}
        columns |= {f"{short}_{name}": numbers for name, numbers in self.counts.items()}
        if self.is_cut is not None:
            columns[f"{short}_truncated"] = self.is_cut.float().tolist()
        if self.shaped is not None:
            columns[f"{short}_reward"] = self.shaped.rewards.tolist()
            if self.shaped.is_clipped is not None:
                columns[f"{short}_clipped"] = self.shaped.is_clipped.float().tolist()
        return columns


def combine(ruled: ScoredAnswers, models: Sequence[ModelScores], rule_weight: float) -> ScoredAnswers:
    """score = rule_weight * rule + sum of weight * reward over the models that score a response.

    With a model, each response's extras also hold all parts of its score: "rule_score" (where there is a rule),
    "rm_score" and so on. They are logged, validated and written into sample tables. "rm_truncated" is 1 where a reward
    model with a tokenizer of its own does not read the end of a conversation, else 0. Where scores are shaped,
    "rm_reward" is the shaped reward and "rm_clipped" says whether it was clipped. The rule's "acc" does not change.
    Raises RewardError, naming the first sample, when a model's score is not finite.
    """
    scores = rule_weight * ruled.scores
    for model in models:
        if not model.scores.isfinite().all():
            row = int(model.all_rows[model.scores.isfinite().int().argmin()])
            who = "the reward model" if model.name == FIRST_MODEL else f"the reward model {model.name}"
            bad = float(model.scores[~model.scores.isfinite()][0])
            raise RewardError(f"{who} gives {bad} to {describe(ruled.samples[row])}")
        scores = scores.index_add(0, model.all_rows, model.weight * model.rewards)
    if not models:
        return replace(ruled, scores=scores)
    parts: list[dict[str, float | str]] = [{} for _ in ruled.outcomes]
    for extras, rule_score, outcome in zip(parts, ruled.scores.tolist(), ruled.outcomes, strict=True):
        if outcome.failure or outcome.score is not None:
            extras["rule_score"] = rule_score
    for model in models:
        for name, values in model.columns.items():
            for row, value in zip(model.all_rows.tolist(), values, strict=True):
                parts[row][name] = value
    outcomes = [
        replace(outcome, extras=outcome.extras | extras) for extras, outcome in zip(parts, ruled.outcomes, strict=True)
    ]
    return replace(ruled, scores=scores, outcomes=outcomes)


def with_turns(scored: ScoredAnswers, models: Sequence[ModelScores], num_sampled: torch.Tensor) -> ScoredAnswers:
    """Add the parts of process reward models. num_sampled: int64 [B], of the responses; nothing without such models."""
    if all(model.turns is None for model in models):
        return scored
    turns = [torch.zeros(number) for number in num_sampled.tolist()]
    for model in models:
        parts = () if model.turns is None else model.turns.unbind()
        for row, values in zip(model.all_rows.tolist(), parts, strict=False):
            turns[row] += model.weight * values
    return replace(scored, turns=turns)


def with_part(scored: ScoredAnswers, name: str, rewards: torch.Tensor | None) -> ScoredAnswers:
    """score + a further reward, float32 [B], which each response's extras then hold as `name`; None: there is none."""
    if rewards is None:
        return scored
    outcomes = [
        replace(outcome, extras=outcome.extras | {name: reward})
        for outcome, reward in zip(scored.outcomes, rewards.tolist(), strict=True)
    ]
    return replace(scored, scores=scored.scores + rewards, outcomes=outcomes)
