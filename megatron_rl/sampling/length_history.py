"""Response lengths per prompt, so that requests that will take long can start first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save

from megatron_rl.records import Batch
from megatron_rl.sampling.rollout_checkpoint import opened
from megatron_rl.sampling.schedule_types import ScheduleConfig

LENGTHS_FILE = "former_lengths.safetensors"
"""A file of a checkpoint: what `LengthHistory.tensors` returns."""


class Longest(NamedTuple):
    """The longest response of a step to a prompt, in tokens."""

    step: int
    num_tokens: int


class LengthHistory:
    """Lengths of the responses in trained batches, by their prompt's index in the dataset (`Prompts.index`).

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
