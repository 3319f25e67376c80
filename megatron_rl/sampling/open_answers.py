"""The answers that are not trained yet: prompt, tokens so far, and log-prob and version of each token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from megatron_rl.records import Batch, Prompts, Sampling, ragged, ragged_from_lengths, single_turn
from megatron_rl.rollout.slices import FINISHED_BY_LENGTH, Drawn, Start

SeedOf = Callable[[int, int, int, int, int], int]
"""(salt, prompt index, sample, attempt, number of tokens drawn) -> seed."""


@dataclass
class OpenAnswer:
    """The answer of one request. attempt: number of restarts with another seed. finish: why it ended; "" before
    that. experts: those of a finished answer, if they were asked for.
    """

    prompt_ids: tuple[int, ...]
    index: int
    sample: int
    sampling: Sampling
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""
    attempt: int = 0
    experts: torch.Tensor | None = None

    def forget(self) -> None:
        """Drop the tokens."""
        self.token_ids, self.log_probs, self.versions, self.finish = [], [], [], ""


@dataclass(frozen=True)
class OpenBatch:
    """Prompts of a step and their answers. greedy: the prompts of greedy answers, which come last in `answers`."""

    prompts: Prompts
    greedy: Prompts | None
    answers: list[OpenAnswer]


class OpenAnswers:
    """The batches that are begun and not trained, by step. All batches have the same number of rows.

    The number of a request is (step - 1) * batch_rows + row; greedy answers are the last rows.
    """

    def __init__(self, batch_rows: int, seed_of: SeedOf, with_versions: bool = True) -> None:
        """with_versions: of tokens; False where all of a batch are of the newest weights."""
        self.batch_rows, self._seed_of, self._with_versions = batch_rows, seed_of, with_versions
        self._batches: dict[int, OpenBatch] = {}

    def add(self, step: int, prompts: Prompts, sampling: Sampling, greedy: Prompts | None, greedily: Sampling) -> None:
        """Begin a batch. Raises ValueError if its number of rows is not batch_rows."""
        answers = [answer for rows, how in ((prompts, sampling), (greedy, greedily)) for answer in _empty(rows, how)]
        if len(answers) != self.batch_rows:
            raise ValueError(f"a batch has {self.batch_rows} requests, this one of step {step} {len(answers)}")
        self._batches[step] = OpenBatch(prompts, greedy, answers)

    def start(self, request: int) -> Start:
        """The message with which a replica begins a request or continues it."""
        answer = self._answer(request)
        drawn, sampling = tuple(answer.token_ids), answer.sampling
        seed = self._seed_of(sampling.salt, answer.index, answer.sample, answer.attempt, len(drawn))
        return Start(request, answer.prompt_ids + drawn, seed, sampling.max_tokens - len(drawn), sampling)

    def extend(self, drawn: dict[int, Drawn], version: int) -> None:
        """Add the tokens that a slice drew with the weights of `version`."""
        for request, new in drawn.items():
            answer = self._answer(request)
            answer.token_ids.extend(new.token_ids)
            answer.log_probs.extend(new.log_probs)
            answer.versions.extend([version] * len(new.token_ids))
            answer.finish, answer.experts = new.finish, new.experts

    def forget(self, requests: Iterable[int]) -> None:
        """Drop the tokens of requests, which are drawn again with the same seeds."""
        for request in requests:
            self._answer(request).forget()

    def truncate(self, request: int) -> None:
        """Take the tokens so far as the answer."""
        self._answer(request).finish = FINISHED_BY_LENGTH

    def resample(self, request: int) -> None:
        """Drop the tokens of a request, which is drawn again with another seed."""
        answer = self._answer(request)
        answer.forget()
        answer.attempt += 1

    def batch(self, step: int) -> tuple[Prompts, Batch, Batch | None]:
        """Prompts of a step, their rows, and greedy answers or None. Raises ValueError if an answer is not
        finished.
        """
        batch = self._batches[step]
        unfinished = [row for row, answer in enumerate(batch.answers) if not answer.finish]
        if unfinished:
            raise ValueError(f"rows {unfinished[:8]} of batch {step} are not finished")
        num_rows = len(batch.prompts)
        greedy = None if batch.greedy is None else rows_of_answers(batch.answers[num_rows:], self._with_versions)
        return batch.prompts, rows_of_answers(batch.answers[:num_rows], self._with_versions), greedy

    def trained(self, step: int) -> None:
        """Drop the batches up to that of `step`."""
        self._batches = {begun: batch for begun, batch in self._batches.items() if begun > step}

    def tensors(self, after_step: int) -> dict[str, torch.Tensor]:
        """The answers of batches after a step, for a checkpoint; prompts are not among them and are read again.

        requests int64 [N, 4]: number, attempt, length, finish (0 none, 1 stop, 2 length). Tokens of all requests end to
        end: token_ids, versions int64 [T], log_probs float32 [T].
        """
        kept = [
            ((step - 1) * self.batch_rows + row, answer)
            for step, batch in sorted(self._batches.items())
            if step > after_step
            for row, answer in enumerate(batch.answers)
            if answer.token_ids or answer.attempt or answer.finish
        ]
        rows = [
            [number, answer.attempt, len(answer.token_ids), FINISHES.index(answer.finish)] for number, answer in kept
        ]
        answers = [answer for _, answer in kept]
        return {
            "requests": torch.tensor(rows, dtype=torch.int64).reshape(-1, 4),
            "token_ids": torch.tensor([token for answer in answers for token in answer.token_ids], dtype=torch.int64),
            "versions": torch.tensor([version for answer in answers for version in answer.versions], dtype=torch.int64),
            "log_probs": torch.tensor([value for answer in answers for value in answer.log_probs], dtype=torch.float32),
        }

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load what `tensors` returned; the batches must be added before. Raises KeyError, ValueError for other
        content.
        """
        lengths = tensors["requests"][:, 2].tolist()
        parts = zip(
            tensors["requests"].tolist(),
            *(tensors[name].split(lengths) for name in ("token_ids", "versions", "log_probs")),
            strict=True,
        )
        for (request, attempt, _, finish), token_ids, versions, log_probs in parts:
            answer = self._answer(request)
            answer.attempt, answer.finish = attempt, FINISHES[finish]
            answer.token_ids, answer.versions = token_ids.tolist(), versions.tolist()
            answer.log_probs = log_probs.tolist()

    def _answer(self, request: int) -> OpenAnswer:
        step, row = divmod(request, self.batch_rows)
        return self._batches[step + 1].answers[row]


FINISHES = ("", "stop", FINISHED_BY_LENGTH)
"""`finish` by its number in checkpoints."""


def _empty(prompts: Prompts | None, sampling: Sampling) -> list[OpenAnswer]:
    if prompts is None:
        return []
    places = zip(prompts.index.tolist(), prompts.sample.tolist(), prompts.prompt_ids.unbind(), strict=True)
    return [OpenAnswer(tuple(ids.tolist()), index, sample, sampling) for index, sample, ids in places]


def rows_of_answers(answers: list[OpenAnswer], with_versions: bool) -> Batch:
    """One row per answer, prompt first, a single turn. Experts are there if all answers have them."""
    experts = [answer.experts for answer in answers if answer.experts is not None]
    lengths = torch.tensor([len(rows) for rows in experts], dtype=torch.int64)
    drawn_by = [answer.versions for answer in answers] if with_versions else []
    return single_turn(
        ragged([torch.tensor([*answer.prompt_ids, *answer.token_ids], dtype=torch.int64) for answer in answers]),
        torch.tensor([len(answer.token_ids) for answer in answers]),
        rollout_log_probs=ragged([torch.tensor(answer.log_probs, dtype=torch.float32) for answer in answers]),
        truncated=torch.tensor([answer.finish == FINISHED_BY_LENGTH for answer in answers]),
        versions=ragged([torch.tensor(row, dtype=torch.int64) for row in drawn_by]) if drawn_by else None,
        routed_experts=ragged_from_lengths(torch.cat(experts), lengths) if len(experts) == len(answers) else None,
    )
