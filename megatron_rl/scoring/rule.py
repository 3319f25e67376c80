"""Rule rewards: decoded answers go to the reward processes, scores come back in row order. Or there is no rule."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.errors import RewardError
from megatron_rl.records import Generations, Prompts
from megatron_rl.scoring.in_process import RewardHere
from megatron_rl.scoring.outcome import FAILURES, Outcome, Sample, describe, name_apart
from megatron_rl.scoring.reward_processes import RewardProcesses


@dataclass(frozen=True)
class ScoredAnswers:
    """What is said of B answers: scores float32 [B], in which failed samples have the configured score.

    outcomes: the rule's; where there is no rule, neither a score nor a failure.
    """

    scores: torch.Tensor
    samples: list[Sample]
    outcomes: list[Outcome]
    first_failure: str | None

    def __getitem__(self, rows: torch.Tensor) -> ScoredAnswers:
        """The answers of these rows, int64 [b]."""
        numbers = rows.tolist()
        samples, outcomes = ([column[row] for row in numbers] for column in (self.samples, self.outcomes))
        return ScoredAnswers(self.scores[rows], samples, outcomes, self.first_failure)

    def metrics(self) -> dict[str, float]:
        """Failed samples, as a share and counted by kind; the mean of each further number over samples that have it."""
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
        """What validation reports, one value per row: "reward", "acc" and each further number.

        Where a result has no "acc", it is the rule's score; without a rule there is none. A failed sample has acc 0,
        and None for the others.
        """
        extras = self._extras(float)
        told = extras.pop("acc", [None] * len(self.outcomes))
        rows = zip(told, self.outcomes, strict=True)
        accuracies = [0.0 if outcome.failure else outcome.score if acc is None else acc for acc, outcome in rows]
        known = {} if None in accuracies else {"acc": accuracies}
        return {**known, "reward": self.scores.tolist(), **extras}

    def numbers(self, key: str, failed: float) -> list[float]:
        """What the reward function said under `key` of each answer, or reward models did; `failed` where the rule did.

        Raises RewardError, naming the first answer that lacks it.
        """
        found = []
        for outcome, sample in zip(self.outcomes, self.samples, strict=True):
            said = {"score": outcome.score, **outcome.extras}
            value = said.get(name_apart(key) if name_apart(key) in said else key)
            if type(value) is not float:
                if not outcome.failure:
                    names = ", ".join(sorted(name for name, other in said.items() if type(other) is float))
                    raise RewardError(
                        f"algorithm.gdpo_reward_keys names {key}, of which the reward function must return a number "
                        f"in its dict; it told only {names or 'none'} of {describe(sample)}"
                    )
                value = failed
            found.append(value)
        return found

    def predictions(self) -> list[str | None]:
        """The answer as the function understood it, its "pred", per row; None where it told none."""
        return self._extras(str).get("pred", [None] * len(self.outcomes))

    def table(self, questions: list[str], step: int) -> list[dict[str, Any]]:
        """Rows of a sample table, under verl's names, with data source and failure."""
        rows = zip(questions, self.samples, self.scores.tolist(), self.outcomes, strict=True)
        return [
            {"input": question, "output": sample.solution, "gts": sample.ground_truth, "score": score, "step": step}
            | {"data_source": sample.data_source, "failure": outcome.failure}
            | outcome.extras
            for question, sample, score, outcome in rows
        ]

    def _extras(self, kind: type) -> dict[str, list[Any]]:
        """Name -> value per row, of extras of one type; None where a row lacks it."""
        names = {name for outcome in self.outcomes for name, value in outcome.extras.items() if type(value) is kind}
        columns = {name: [outcome.extras.get(name) for outcome in self.outcomes] for name in sorted(names)}
        return {name: [v if type(v) is kind else None for v in column] for name, column in columns.items()}


def join(parts: Sequence[ScoredAnswers]) -> ScoredAnswers:
    """Several batches of answers as one."""
    return ScoredAnswers(
        torch.cat([part.scores for part in parts]),
        [sample for part in parts for sample in part.samples],
        [outcome for part in parts for outcome in part.outcomes],
        next((part.first_failure for part in parts if part.first_failure is not None), None),
    )


class RuleReward:
    """Scores decoded answers. A context manager: inside it the reward processes run."""

    def __init__(
        self,
        processes: RewardProcesses | RewardHere,
        tokenizer: PreTrainedTokenizerBase,
        failed_score: float = 0.0,
        stop_if_all_failed: bool = True,
    ):
        """`failed_score` is what a sample gets for which the function has no score."""
        self.processes, self.tokenizer = processes, tokenizer
        self.failed_score, self.stop_if_all_failed = failed_score, stop_if_all_failed

    def __enter__(self) -> Self:
        """Start the processes."""
        self.processes.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        """End them."""
        self.processes.__exit__(*failure)

    def __call__(self, prompts: Prompts, generations: Generations) -> ScoredAnswers:
        """Score B answers, special tokens (EOS, padding) removed from their text; an empty answer is the text "".

        Raises RewardError, naming the first sample, if all of them fail, unless that is allowed.
        """
        samples = read_samples(prompts, generations, self.tokenizer)
        outcomes = self.processes.score(samples)
        failures = [row for row, outcome in enumerate(outcomes) if outcome.failure]
        first_failure = None
        if failures:
            row = failures[0]
            first_failure = f"{outcomes[row].reason} ({describe(samples[row], int(prompts.index[row]))})"
        if len(failures) == len(samples) and self.stop_if_all_failed:
            raise RewardError(f"none of {len(samples)} samples could be scored; the first: {first_failure}")
        scores = [self.failed_score if outcome.failure else outcome.score for outcome in outcomes]
        return ScoredAnswers(torch.tensor(scores, dtype=torch.float32), samples, outcomes, first_failure)


class NoRule(contextlib.nullcontext[Any]):
    """What stands in the place of a rule where a reward model judges alone: every score is 0, and nobody's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        """The tokenizer is for sample tables."""
        super().__init__(self)
        self.tokenizer = tokenizer

    def __call__(self, prompts: Prompts, generations: Generations) -> ScoredAnswers:
        """B answers without a score."""
        samples = read_samples(prompts, generations, self.tokenizer)
        return ScoredAnswers(torch.zeros(len(samples)), samples, [Outcome(None) for _ in samples], None)


def read_samples(prompts: Prompts, generations: Generations, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """What a rule may know of B answers, as text without special tokens."""
    response_ids = [row.tolist() for row in generations.response_ids.unbind()]
    solutions = tokenizer.batch_decode(response_ids, skip_special_tokens=True)
    columns = (prompts.data_source, solutions, prompts.ground_truth, prompts.extra_info)
    return [Sample(*row) for row in zip(*columns, strict=True)]
