"""Every request that is not trained yet: what was asked, and its tokens with the log-prob and the version of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from megatron_rl.records import Generations, Prompts, Sampling, ragged
from megatron_rl.rollout.slices import FINISHED_BY_LENGTH, Drawn, Start

SeedOf = Callable[[int, int, int, int, int], int]
"""(salt, prompt index, sample, attempt, number of tokens drawn) -> seed."""


@dataclass
class OpenAnswer:
    """One request. attempt: how often it was begun with another seed. finish: why it ended; empty while it has not."""

    prompt_ids: tuple[int, ...]
    index: int
    sample: int
    sampling: Sampling
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""
    attempt: int = 0

    def forget(self) -> None:
        """Nothing was drawn."""
        self.token_ids, self.log_probs, self.versions, self.finish = [], [], [], ""


@dataclass(frozen=True)
class AnswerBatch:
    """Prompts of a step, and of them one for each greedy answer, whose requests come after the others."""

    prompts: Prompts
    greedy: Prompts | None
    answers: list[OpenAnswer]


class OpenAnswers:
    """The batches that were drawn and are not trained, by step; all of one size.

    A request's number is (step - 1) * batch_rows + row, where greedy answers are the last rows.
    """

    def __init__(self, batch_rows: int, seed_of: SeedOf) -> None:
        self.batch_rows, self._seed_of = batch_rows, seed_of
        self._batches: dict[int, AnswerBatch] = {}

    def add(self, step: int, prompts: Prompts, sampling: Sampling, greedy: Prompts | None, greedily: Sampling) -> None:
        """Begin a batch. Raises ValueError where it has another number of rows than the others."""
        answers = [answer for rows, how in ((prompts, sampling), (greedy, greedily)) for answer in _asked(rows, how)]
        if len(answers) != self.batch_rows:
            raise ValueError(f"a batch has {self.batch_rows} requests, this one of step {step} {len(answers)}")
        self._batches[step] = AnswerBatch(prompts, greedy, answers)

    def start(self, request: int) -> Start:
        """What a replica is told to begin a request, or to go on with it."""
        answer = self._answer(request)
        drawn, sampling = tuple(answer.token_ids), answer.sampling
        seed = self._seed_of(sampling.salt, answer.index, answer.sample, answer.attempt, len(drawn))
        return Start(request, answer.prompt_ids + drawn, seed, sampling.max_tokens - len(drawn), sampling)

    def extend(self, drawn: dict[int, Drawn], version: int) -> None:
        """Take what a slice drew with the weights of `version`."""
        for request, new in drawn.items():
            answer = self._answer(request)
            answer.token_ids.extend(new.token_ids)
            answer.log_probs.extend(new.log_probs)
            answer.versions.extend([version] * len(new.token_ids))
            answer.finish = new.finish

    def forget(self, requests: Iterable[int]) -> None:
        """Their tokens are lost; they are drawn again with the same seeds."""
        for request in requests:
            self._answer(request).forget()

    def truncate(self, request: int) -> None:
        """The tokens that are there are the answer."""
        self._answer(request).finish = FINISHED_BY_LENGTH

    def resample(self, request: int) -> None:
        """It is drawn again, with another seed."""
        answer = self._answer(request)
        answer.forget()
        answer.attempt += 1

    def batch(self, step: int) -> tuple[Prompts, Generations, Generations | None]:
        """A step's prompts, their answers, and the greedy ones where there are such; all must be finished."""
        batch = self._batches[step]
        unfinished = [row for row, answer in enumerate(batch.answers) if not answer.finish]
        if unfinished:
            raise ValueError(f"rows {unfinished[:8]} of batch {step} are not finished")
        num_rows = len(batch.prompts)
        greedy = None if batch.greedy is None else generations(batch.answers[num_rows:])
        return batch.prompts, generations(batch.answers[:num_rows]), greedy

    def trained(self, step: int) -> None:
        """Batches up to that of `step` are not needed any more."""
        for done in [known for known in self._batches if known <= step]:
            del self._batches[done]

    def tensors(self, after_step: int) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps of the batches after a step, whose prompts are read again.

        requests int64 [N, 4]: number, attempt, length, 0 unfinished, 1 stopped, 2 at its longest; then all tokens, end
        to end: token_ids, versions int64 [T], log_probs float32 [T].
        """
        kept = [
            ((step - 1) * self.batch_rows + row, answer)
            for step, batch in sorted(self._batches.items())
            if step > after_step
            for row, answer in enumerate(batch.answers)
            if answer.token_ids or answer.attempt or answer.finish
        ]
        rows = [[number, one.attempt, len(one.token_ids), FINISHES.index(one.finish)] for number, one in kept]
        return {
            "requests": torch.tensor(rows, dtype=torch.int64).reshape(-1, 4),
            "token_ids": torch.tensor([token for _, one in kept for token in one.token_ids], dtype=torch.int64),
            "versions": torch.tensor([version for _, one in kept for version in one.versions], dtype=torch.int64),
            "log_probs": torch.tensor([value for _, one in kept for value in one.log_probs], dtype=torch.float32),
        }

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take what `tensors` gave; the batches were added before. Raises KeyError, ValueError for anything else."""
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
"""In the order of their numbers in checkpoints."""


def _asked(prompts: Prompts | None, sampling: Sampling) -> list[OpenAnswer]:
    if prompts is None:
        return []
    places = zip(prompts.index.tolist(), prompts.sample.tolist(), prompts.prompt_ids.unbind(), strict=True)
    return [OpenAnswer(tuple(ids.tolist()), index, sample, sampling) for index, sample, ids in places]


def generations(answers: list[OpenAnswer]) -> Generations:
    """A row for each answer. An answer without a token is an empty row."""
    return Generations(
        response_ids=ragged([torch.tensor(one.token_ids, dtype=torch.int64) for one in answers]),
        rollout_log_probs=ragged([torch.tensor(one.log_probs, dtype=torch.float32) for one in answers]),
        truncated=torch.tensor([one.finish == FINISHED_BY_LENGTH for one in answers]),
        versions=ragged([torch.tensor(one.versions, dtype=torch.int64) for one in answers]),
        batch_size=[len(answers)],
    )
