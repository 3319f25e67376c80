"""Rule rewards: send decoded responses to the reward processes and collect their scores in row order; or no rule."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.errors import RewardError
from megatron_rl.records import Batch, first_true
from megatron_rl.scoring.outcome import Outcome, Sample, describe
from megatron_rl.scoring.reward_processes import RewardHere, RewardProcesses
from megatron_rl.scoring.scored_answers import ScoredAnswers


@dataclass(frozen=True)
class Ended:
    """A response that has ended before its batch is complete. number: its request. row: its task. token_ids: all
    that follows the prompt. group: the numbers of the responses to its prompt that are compared with each other, in
    order.
    """

    number: int
    row: Mapping[str, Any]
    token_ids: Sequence[int]
    group: Sequence[int]
    num_sampled: int
    truncated: bool
    environment_reward: float | None = None


class RuleReward:
    """Scores decoded responses. A context manager: inside it the reward processes run."""

    def __init__(
        self,
        processes: RewardProcesses | RewardHere,
        tokenizer: PreTrainedTokenizerBase,
        failed_score: float = 0.0,
        stop_if_all_failed: bool = True,
    ):
        """failed_score: of a sample for which the function has no score."""
        self.processes, self.tokenizer = processes, tokenizer
        self.failed_score, self.stop_if_all_failed = failed_score, stop_if_all_failed
        self.unasked = Outcome(failed_score, {"acc": 0.0})

    def __enter__(self) -> Self:
        """Start the processes."""
        self.processes.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        """End the processes."""
        self.processes.__exit__(*failure)

    def under_way(self, phase: str) -> list[str]:
        """Return how many responses are still to score, while that is waited for; any thread may ask."""
        if phase != "reward" or not isinstance(self.processes, RewardProcesses):
            return []
        return [f"{self.processes.num_open} responses left"]

    def begin(self, answer: Ended) -> None:
        """Score a response while others are generated. Raises RewardError where the reward processes have died."""
        self.processes.begin(answer.number, self.sample_of(answer))

    def is_scored(self, numbers: Sequence[int]) -> bool:
        """Whether responses with these request numbers, as far as they have begun, are scored; does not wait."""
        return self.processes.is_scored(numbers)

    def for_groups(self) -> Self:
        """Return what scores some groups of a batch at a time: no group stops the run if none of it can be scored."""
        rule = copy.copy(self)
        rule.stop_if_all_failed = False
        return rule

    def sample_of(self, answer: Ended) -> Sample:
        """Return the arguments of a reward function for a response that has ended."""
        return sample_of(self.tokenizer, answer)

    def __call__(self, rows: Batch, numbers: Sequence[int] = ()) -> ScoredAnswers:
        """Score B responses. Their text has no special tokens (EOS, padding); an empty response is the text "".

        numbers: request numbers, if they may have begun. Raises RewardError, naming the first sample,
        if all of them fail, unless that is allowed.
        """
        samples = read_samples(rows, self.tokenizer)
        outcomes = self.outcomes(samples, rows, numbers)
        asked = sum(outcome is not self.unasked for outcome in outcomes)
        failures = [row for row, outcome in enumerate(outcomes) if outcome.failure]
        first_failure = None
        if failures:
            row = failures[0]
            first_failure = f"{outcomes[row].reason} ({describe(samples[row], int(rows['index'][row]))})"
        if 0 < asked == len(failures) and self.stop_if_all_failed:
            raise RewardError(f"none of {asked} samples could be scored; the first: {first_failure}")
        scores = [self.failed_score if outcome.failure else outcome.score for outcome in outcomes]
        return ScoredAnswers(torch.tensor(scores, dtype=torch.float32), samples, outcomes, first_failure)

    def outcomes(self, samples: Sequence[Sample], rows: Batch, numbers: Sequence[int]) -> list[Outcome]:
        """Return an outcome for each response; `self.unasked` for one that the function did not get."""
        return self.processes.score(samples, numbers)


class NoRule(contextlib.nullcontext[Any]):
    """Replaces a rule where only reward models score: every score is 0, and no outcome has one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        """tokenizer: decodes responses for sample tables."""
        super().__init__(self)
        self.tokenizer = tokenizer

    def under_way(self, phase: str) -> list[str]:
        """Return nothing: nothing is waited for."""
        return []

    def begin(self, answer: Ended) -> None:
        """Do nothing."""

    def is_scored(self, numbers: Sequence[int]) -> bool:
        """Return True: there is nothing to score."""
        return True

    def for_groups(self) -> Self:
        """Return this."""
        return self

    def __call__(self, rows: Batch, numbers: Sequence[int] = ()) -> ScoredAnswers:
        """Return B responses without a score."""
        samples = read_samples(rows, self.tokenizer)
        return ScoredAnswers(torch.zeros(len(samples)), samples, [Outcome(None) for _ in samples], None)


def sample_of(tokenizer: PreTrainedTokenizerBase, answer: Ended) -> Sample:
    """Return the arguments of a reward function for a response that has ended before its batch is complete."""
    text, row = tokenizer.decode(answer.token_ids, skip_special_tokens=True), answer.row
    return Sample(row["data_source"], text, row["ground_truth"], row["extra_info"])


def read_samples(rows: Batch, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Return the arguments of a reward function for B responses: all after the prompt, without special tokens."""
    starts = first_true(rows["sampled"]).tolist()
    response_ids = [row[start:].tolist() for row, start in zip(rows["input_ids"].unbind(), starts, strict=True)]
    solutions = tokenizer.batch_decode(response_ids, skip_special_tokens=True)
    columns = (rows.objects("data_source"), solutions, rows.objects("ground_truth"), rows.objects("extra_info"))
    return [Sample(*row) for row in zip(*columns, strict=True)]
