"""Responses of earlier steps, by prompt: speculative decoding takes draft tokens from them; their lengths tell which
requests will take long and should start first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save

from megatron_rl.records import Batch, first_true, row_lengths
from megatron_rl.sampling.rollout_checkpoint import opened
from megatron_rl.sampling.schedule_types import ScheduleConfig

EARLIER_FILE = "earlier_answers.safetensors"
"""A file of a checkpoint: what `ResponseHistory.tensors` returns."""


class Kept(NamedTuple):
    """A response of a step: int32 as bytes, the prompt's last tokens and all that came after."""

    step: int
    token_ids: bytes


class ResponseHistory:
    """Responses of trained batches, by their prompt's index in the dataset (column `index`).

    A request of batch s uses only responses from steps up to s - 1 - ahead, whenever it starts. So a run that is
    resumed or replayed, or that loses replicas, makes the same proposals.
    """

    def __init__(self, num_kept: int, num_context: int, ahead: int) -> None:
        """num_kept: responses that a request uses, at most. num_context: tokens of the prompt before each, at most.
        ahead: see `ScheduleConfig`.
        """
        self._num_kept, self._num_context, self._ahead = num_kept, num_context, ahead
        self._answers: dict[int, list[Kept]] = defaultdict(list)
        self._prompts_of: dict[int, set[int]] = {}  # step -> prompts of which more may be kept than are ever named

    def of(self, prompt: int, batch: int) -> tuple[bytes, ...]:
        """Return the last responses to a prompt that a request of `batch` may use: all different, the oldest first."""
        return tuple(kept.token_ids for kept in self._named(self._answers.get(prompt, ()), batch))

    def add(self, step: int, prompts: torch.Tensor, rows: Batch) -> None:
        """Record the responses of a trained step, once. prompts: int64 [B], the index of each row's prompt."""
        if step in self._prompts_of:
            return
        lengths, starts = row_lengths(rows["input_ids"]).tolist(), first_true(rows["sampled"]).tolist()
        parts = rows.flat("input_ids").to(torch.int32).split(lengths)
        for prompt, tokens, start, length in zip(prompts.tolist(), parts, starts, lengths, strict=True):
            if start < length:  # of an episode that failed the prompt alone is left
                token_ids = tokens[max(0, start - self._num_context) :].numpy().tobytes()
                self._answers[prompt].append(Kept(step, token_ids))
        self._prompts_of[step] = set(prompts.tolist())
        # If this step is given up, its batch is generated again, and must find what it found.
        for old in [number for number in self._prompts_of if number <= self._last_named(step)]:
            for prompt in self._prompts_of.pop(old):
                self._drop(prompt, step)

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """The responses up to those of a step, for a checkpoint.

        responses int64 [N, 3]: prompt, step, tokens. token_ids int32 [T]: those of all responses, end to end.
        """
        kept = [(prompt, a) for prompt, answers in self._answers.items() for a in answers if a.step <= step]
        rows = [[prompt, answer.step, len(answer.token_ids) // 4] for prompt, answer in kept]
        joined = bytearray(b"".join(answer.token_ids for _, answer in kept))
        token_ids = torch.frombuffer(joined, dtype=torch.int32) if joined else torch.empty(0, dtype=torch.int32)
        return {"answers": torch.tensor(rows, dtype=torch.int64).reshape(-1, 3), "token_ids": token_ids}

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load what `tensors` returned. Raises KeyError and ValueError for other content."""
        rows = tensors["answers"].tolist()
        parts = tensors["token_ids"].split([length for _, _, length in rows]) if rows else []
        for (prompt, step, _), token_ids in zip(rows, parts, strict=True):
            self._answers[prompt].append(Kept(step, token_ids.numpy().tobytes()))
            self._prompts_of.setdefault(step, set()).add(prompt)

    def write(self, folder: Path, step: int) -> None:
        """Write the responses up to those of a step to a checkpoint. Raises OSError."""
        (folder / EARLIER_FILE).write_bytes(save(self.tensors(step)))

    def read(self, folder: Path) -> None:
        """Load from a checkpoint; empty if its run did not record any. Raises ConfigError for a damaged file."""
        if (folder / EARLIER_FILE).exists():
            with opened(folder / EARLIER_FILE) as content:
                self.load_tensors({name: content.get_tensor(name) for name in content.keys()})  # noqa: SIM118

    def _last_named(self, batch: int) -> int:
        """The last step whose responses requests of a batch name: no older weights may generate it."""
        return batch - 1 - self._ahead

    def _named(self, answers: Sequence[Kept], batch: int) -> list[Kept]:
        last, named = self._last_named(batch), dict[bytes, Kept]()
        for kept in reversed(answers):
            if kept.step <= last and len(named) < self._num_kept:
                named.setdefault(kept.token_ids, kept)
        return list(reversed(named.values()))

    def _drop(self, prompt: int, batch: int) -> None:
        """Drop what no request of this batch or a later one names."""
        answers, last = self._answers[prompt], self._last_named(batch)
        self._answers[prompt] = self._named(answers, batch) + [kept for kept in answers if kept.step > last]


LENGTHS_FILE = "former_lengths.safetensors"
"""A file of a checkpoint: what `LengthHistory.tensors` returns."""


class Longest(NamedTuple):
    """The longest response of a step to a prompt, in tokens."""

    step: int
    num_tokens: int


class LengthHistory:
    """Lengths of the responses in trained batches, by their prompt's index in the dataset (column `index`).

    What is known of a prompt depends on the batch alone, as for `ResponseHistory`. prompt_of: request -> its prompt's
    index, and batch_of: -> its batch; the owner of the run's responses sets both.
    """

    def __init__(self, rules: ScheduleConfig) -> None:
        self._ahead = rules.ahead
        self.prompt_of: Callable[[int], int] = lambda request: request
        self.batch_of: Callable[[int], int] = rules.batch_of
        self._lengths: dict[int, list[Longest]] = defaultdict(list)

    def expected(self, request: int) -> int | None:
        """Return the tokens of the longest known response to a request's prompt; None if none is known."""
        return self.of(self.prompt_of(request), self.batch_of(request))

    def of(self, prompt: int, batch: int) -> int | None:
        """Return the tokens of the longest response to a prompt in the last step that a request of `batch` may use;
        or None.
        """
        known = [one.num_tokens for one in self._lengths.get(prompt, ()) if one.step < batch - self._ahead]
        return known[-1] if known else None

    def add(self, step: int, prompts: torch.Tensor, rows: Batch) -> None:
        """Record the responses of a trained step. prompts: int64 [B], the index of each row's prompt."""
        longest: dict[int, int] = defaultdict(int)
        for prompt, length in zip(prompts.tolist(), rows.num_sampled.tolist(), strict=True):
            longest[prompt] = max(longest[prompt], length)
        for prompt, num_tokens in longest.items():
            lengths = [one for one in self._lengths[prompt] if one.step < step]  # a step may be repeated
            # If this step is given up, its batch is generated again, and must find what it found.
            old = [one for one in lengths if one.step < step - self._ahead][-1:]
            new = [one for one in lengths if one.step >= step - self._ahead]
            self._lengths[prompt] = [*old, *new, Longest(step, num_tokens)]

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """What is known up to a step, for a checkpoint. lengths int64 [N, 3]: prompt, step, tokens."""
        rows = [[prompt, *one] for prompt, lengths in self._lengths.items() for one in lengths if one.step <= step]
        return {"lengths": torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)}

    def write(self, folder: Path, step: int) -> None:
        """Write what is known up to a step to a checkpoint. Raises OSError."""
        (folder / LENGTHS_FILE).write_bytes(save(self.tensors(step)))

    def read(self, folder: Path) -> None:
        """Load from a checkpoint; empty if its run did not record any. Raises ConfigError for a damaged file."""
        if (folder / LENGTHS_FILE).exists():
            with opened(folder / LENGTHS_FILE) as content:
                for prompt, step, num_tokens in content.get_tensor("lengths").tolist():
                    self._lengths[prompt].append(Longest(step, num_tokens))


def longest_first(requests: Sequence[int], expected: Sequence[int | None], drawn: Sequence[int]) -> list[int]:
    """The requests in the order in which an engine is to begin them.

    Those that have generated something continue first: an earlier step left them. Then the longest expected; a request
    of which nothing is expected counts as the mean of the others. Of equal ones the lower number is first.
    """
    known = [length for length in expected if length is not None]
    mean = sum(known) / len(known) if known else 0.0
    rows = zip(requests, expected, drawn, strict=True)
    keyed = [(num == 0, -(mean if length is None else length), request) for request, length, num in rows]
    return [request for *_, request in sorted(keyed)]
