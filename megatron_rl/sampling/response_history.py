"""Last responses per prompt, from which speculative decoding proposes draft tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save

from megatron_rl.records import Batch, first_true, row_lengths
from megatron_rl.sampling.rollout_checkpoint import opened

EARLIER_FILE = "earlier_answers.safetensors"
"""A file of a checkpoint: what `ResponseHistory.tensors` returns."""


class Kept(NamedTuple):
    """A response of a step: int32 as bytes, the prompt's last tokens and all that came after."""

    step: int
    token_ids: bytes


class ResponseHistory:
    """Responses of trained batches, by their prompt's index in the dataset (`Prompts.index`).

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
