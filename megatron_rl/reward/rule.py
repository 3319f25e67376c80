"""Rule rewards: decoded answers go to the reward processes, scores come back in row order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.errors import RewardError
from megatron_rl.records import Generations, Prompts
from megatron_rl.reward.outcome import FAILURES, Outcome, Sample, describe
from megatron_rl.reward.processes import RewardProcesses


@dataclass(frozen=True)
class Scored:
    """What the rules say of B answers: scores float32 [B], in which failed samples have the configured score."""

    scores: torch.Tensor
    samples: list[Sample]
    outcomes: list[Outcome]
    first_failure: str | None

    def __getitem__(self, rows: torch.Tensor) -> Scored:
        """The answers of these rows, int64 [b]."""
        numbers = rows.tolist()
        picked = [[column[row] for row in numbers] for column in (self.samples, self.outcomes)]
        return Scored(self.scores[rows], *picked, self.first_failure)

    def metrics(self) -> dict[str, float]:
        """Failed samples, as a share and counted by kind; the mean of each further number over samples that have it."""
        kinds = Counter(outcome.failure for outcome in self.outcomes)
        metrics = {"reward/failed_ratio": 1 - kinds[""] / len(self.outcomes)}
        metrics |= {f"reward/{kind}": float(kinds[kind]) for kind in FAILURES}
        for name, values in self._extras(float).items():
            known = [value for value in values if value is not None]
            metrics[f"reward/{name}/mean"] = sum(known) / len(known)
        return metrics

    def variables(self) -> dict[str, list[float | None]]:
        """What validation reports, one value per row: "reward", "acc" and each further number.

        Where a result has no "acc", it is the score. A failed sample has acc 0, and None for the others.
        """
        extras = self._extras(float)
        told = extras.pop("acc", [None] * len(self.outcomes))
        rows = zip(told, self.scores.tolist(), self.outcomes, strict=True)
        accuracies = [0.0 if outcome.failure else score if acc is None else acc for acc, score, outcome in rows]
        return {"acc": accuracies, "reward": self.scores.tolist(), **extras}

    def predictions(self) -> list[str | None]:
        """The answer as the function understood it, its "pred", per row; None where it told none."""
        return self._extras(str).get("pred", [None] * len(self.outcomes))

    def table(self, questions: list[str], step: int) -> list[dict]:
        """Rows of a sample table, under verl's names, with data source and failure."""
        rows = zip(questions, self.samples, self.scores.tolist(), self.outcomes, strict=True)
        return [
            {"input": question, "output": sample.solution, "gts": sample.ground_truth, "score": score, "step": step}
            | {"data_source": sample.data_source, "failure": outcome.failure}
            | outcome.extras
            for question, sample, score, outcome in rows
        ]

    def _extras(self, kind: type) -> dict[str, list]:
        """Name -> value per row, of extras of one type; None where a row lacks it."""
        names = {name for outcome in self.outcomes for name, value in outcome.extras.items() if type(value) is kind}
        columns = {name: [outcome.extras.get(name) for outcome in self.outcomes] for name in sorted(names)}
        return {name: [v if type(v) is kind else None for v in column] for name, column in columns.items()}


def join(parts: Sequence[Scored]) -> Scored:
    """Several batches of answers as one."""
    return Scored(
        torch.cat([part.scores for part in parts]),
        [sample for part in parts for sample in part.samples],
        [outcome for part in parts for outcome in part.outcomes],
        next((part.first_failure for part in parts if part.first_failure is not None), None),
    )


class RuleReward:
    """Scores decoded answers."""

    def __init__(
        self,
        processes: RewardProcesses,
        tokenizer: PreTrainedTokenizerBase,
        failed_score: float = 0.0,
        stop_if_all_failed: bool = True,
    ):
        """`failed_score` is what a sample gets for which the function has no score."""
        self.processes, self.tokenizer = processes, tokenizer
        self.failed_score, self.stop_if_all_failed = failed_score, stop_if_all_failed

    def __call__(self, prompts: Prompts, generations: Generations) -> Scored:
        """Score B answers, special tokens (EOS, padding) removed from their text; an empty answer is the text "".

        Raises RewardError, naming the first sample, if all of them fail, unless that is allowed.
        """
        response_ids = [row.tolist() for row in generations.response_ids.unbind()]
        solutions = self.tokenizer.batch_decode(response_ids, skip_special_tokens=True)
        columns = (prompts.data_source, solutions, prompts.ground_truth, prompts.extra_info)
        samples = [Sample(*row) for row in zip(*columns, strict=True)]
        outcomes = self.processes.score(samples)
        failures = [row for row, outcome in enumerate(outcomes) if outcome.failure]
        first_failure = None
        if failures:
            row = failures[0]
            first_failure = f"{outcomes[row].reason} ({describe(samples[row], int(prompts.index[row]))})"
        if len(failures) == len(samples) and self.stop_if_all_failed:
            raise RewardError(f"none of {len(samples)} samples could be scored; the first: {first_failure}")
        scores = [self.failed_score if outcome.failure else outcome.score for outcome in outcomes]
        return Scored(torch.tensor(scores, dtype=torch.float32), samples, outcomes, first_failure)
