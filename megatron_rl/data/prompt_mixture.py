"""The order in which training visits the prompts of several files: endless, seeded, resumable. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.data.prompt_cursor import PromptCursor
from megatron_rl.errors import ConfigError


@dataclass(frozen=True)
class PromptFile:
    """What one file contributes: its usable prompts, and digests of their contents, in order, by what they are of."""

    path: str
    num_prompts: int
    digests: dict[str, str]


class MixtureCursor:
    """Yields batches of positions in files laid end to end.

    Without weights all prompts are one set, each visited once an epoch. With weights, file i gives weights[i] / sum of
    every batch, to the nearest prompt, and each file has epochs of its own: a small one with a large weight comes
    round more often.
    """

    def __init__(
        self, files: Sequence[PromptFile], weights: Sequence[float] | None, batch_size: int, shuffle: bool, seed: int
    ):
        """Start at the beginning. Raises ConfigError if the sizes are below 1 or there are not as many weights."""
        if weights is not None and (len(weights) != len(files) or min(weights) <= 0):
            raise ConfigError(
                f"data.train_file_weights={list(weights)} must be one number above 0 for each of {len(files)} files"
            )
        self.files = list(files)
        self.weights = None if weights is None else list(weights)
        self.batch_size = batch_size
        sizes = [file.num_prompts for file in files]
        if weights is None:
            self.shares, self._streams = [1.0], [PromptCursor(sum(sizes), batch_size, shuffle, seed)]
        else:
            self.shares = [weight / sum(weights) for weight in weights]
            self._streams = [PromptCursor(size, 1, shuffle, seed) for size in sizes]
        self._offsets = [sum(sizes[:number]) for number in range(len(self._streams))]
        self.drawn = [0] * len(self._streams)

    def next_indices(self) -> list[int]:
        """The next `batch_size` positions, each in [0, number of prompts of all files)."""
        if self.weights is None:
            self.drawn[0] += self.batch_size
            return self._streams[0].next_indices()
        return [self._next_index() for _ in range(self.batch_size)]

    def _next_index(self) -> int:
        """From the file that lags furthest behind its share."""
        total = sum(self.drawn) + 1
        lags = [share * total - drawn for share, drawn in zip(self.shares, self.drawn, strict=True)]
        number = lags.index(max(lags))
        self.drawn[number] += 1
        return self._offsets[number] + self._streams[number].next_indices()[0]

    def state_dict(self) -> dict[str, Any]:
        """Where each stream stands, and the files, weights and order for which that means something; JSON-ready."""
        return {
            "files": [_identity(file) for file in self.files],
            "weights": self.weights,
            "drawn": list(self.drawn),
            "streams": [stream.state_dict() for stream in self._streams],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; `batch_size` and the files' folder may differ.

        Raises ConfigError, with what differs, if files, their contents, weights or order are others.
        """
        own = self.state_dict()
        names, names_before = ([file["name"] for file in files] for files in (own["files"], state["files"]))
        if names != names_before:
            raise ConfigError(_refusal("data.train_files", names, names_before))
        for now, before in zip(own["files"], state["files"], strict=True):
            if now["num_prompts"] != before["num_prompts"]:
                what = f"the number of usable prompts (num_prompts) of {now['name']}"
                raise ConfigError(_refusal(what, now["num_prompts"], before["num_prompts"]))
            differ = [name for name, digest in now["digests"].items() if before["digests"].get(name) != digest]
            if differ:
                what = f"the digest of {', '.join(differ)} of {now['name']} (contents or order)"
                ours, theirs = (
                    ", ".join(file["digests"].get(name, "")[:12] for name in differ) for file in (now, before)
                )
                raise ConfigError(_refusal(what, ours, theirs))
        if own["weights"] != state["weights"]:
            raise ConfigError(_refusal("data.train_file_weights", own["weights"], state["weights"]))
        for stream, saved in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(saved)
        self.drawn = list(state["drawn"])


def _identity(file: PromptFile) -> dict[str, Any]:
    return {"name": Path(file.path).name, "num_prompts": file.num_prompts, "digests": file.digests}


def _refusal(what: str, now: object, before: object) -> str:
    return (
        f"cannot resume the prompt order: {what} is {now} now and was {before} when it was saved; "
        f"set it back, or start a new run"
    )
