"""The order in which training visits the prompts or examples of some files: endless, seeded, resumable. Pure."""

from __future__ import annotations

import copy
import hashlib
import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.errors import ConfigError


@dataclass(frozen=True)
class PromptFile:
    """The part that one file has in training.

    num_prompts: its usable prompts. digests: name of what is compared when a run resumes, such as tokens -> a digest
    of it over these prompts, in order.
    """

    path: str
    num_prompts: int
    digests: dict[str, str]

    @property
    def identity(self) -> dict[str, Any]:
        """The file as a checkpoint knows it, whatever its folder; JSON-ready."""
        return {"name": Path(self.path).name, "num_prompts": self.num_prompts, "digests": self.digests}


def digest_of(parts: Iterable[bytes]) -> str:
    """Return a digest for `PromptFile.digests`."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def digest_of_tokens(rows: Iterable[Sequence[int]]) -> str:
    """Return the digest of token ids, row after row."""
    return digest_of(array("q", [len(ids), *ids]).tobytes() for ids in rows)


def digest_of_values(values: Iterable[object]) -> str:
    """Return the digest of Python values, one for each row."""
    return digest_of(f"{value!r}\n".encode("utf-8", "backslashreplace") for value in values)


class PromptCursor(Protocol):
    """An order of prompts, and a place in it."""

    def next_indices(self) -> list[int]: ...


@dataclass
class _Epochs:
    """An endless stream of positions in [0, num_prompts).

    Each epoch visits every position once, in order or (`shuffle`) in a permutation that depends on (seed, epoch) alone.
    """

    epoch: int
    position: int
    num_prompts: int
    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        self._order = self._epoch_order()

    def next_index(self) -> int:
        if self.position == self.num_prompts:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._epoch_order()
        self.position += 1
        return self._order[self.position - 1]

    def _epoch_order(self) -> list[int]:
        order = list(range(self.num_prompts))
        if self.shuffle:
            random.Random(f"{self.seed},{self.epoch}").shuffle(order)
        return order


class MixtureCursor:
    """Yields batches of positions in files packed end to end.

    Without weights all files are one set, each position of which is visited once an epoch. With weights, file i gives
    weights[i] / sum of every batch, to the nearest prompt, and each file has epochs of its own: a small file with a
    large weight repeats more often. A batch may straddle epochs, so every batch is full and no prompt is lost; such a
    batch, or one larger than a file, can hold a prompt more than once.
    """

    def __init__(
        self, files: Sequence[PromptFile], weights: Sequence[float] | None, batch_size: int, shuffle: bool, seed: int
    ):
        """Start at the beginning of epoch 0. Raises ConfigError for wrong weights, and for sizes below 1."""
        if weights is not None and (len(weights) != len(files) or min(weights) <= 0):
            raise ConfigError(
                f"data.train_file_weights={list(weights)} must be one number above 0 for each of {len(files)} files"
            )
        self.files = list(files)
        self.weights = None if weights is None else list(weights)
        self.batch_size = batch_size
        sizes = [file.num_prompts for file in files]
        if weights is None:
            sizes, weights = [sum(sizes)], [1.0]
        smallest = min(sizes)
        if smallest < 1 or batch_size < 1:
            raise ConfigError(
                f"cannot make batches of {batch_size} prompts from {smallest} prompts: both must be at least 1; "
                f"try: {max(batch_size, 1)} from {max(smallest, 1)}"
            )
        self.shares = [weight / sum(weights) for weight in weights]
        self.drawn = [0] * len(sizes)
        self._offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        self._streams = [_Epochs(0, 0, size, shuffle, seed) for size in sizes]

    def next_indices(self) -> list[int]:
        """The next `batch_size` positions, each in [0, number of prompts of all files)."""
        return [self._next_index() for _ in range(self.batch_size)]

    def ahead(self) -> PromptCursor:
        """A cursor for batches that are begun before they are trained; it stands where this one does."""
        return copy.deepcopy(self)

    def _next_index(self) -> int:
        """The next position of the stream that lags furthest behind its share."""
        total = sum(self.drawn) + 1
        lags = [share * total - drawn for share, drawn in zip(self.shares, self.drawn, strict=True)]
        number = lags.index(max(lags))
        self.drawn[number] += 1
        return self._offsets[number] + self._streams[number].next_index()

    def state_dict(self) -> dict[str, Any]:
        """Where each stream stands, and the files, weights and order for which that means something; JSON-ready."""
        return {
            "files": [file.identity for file in self.files],
            "weights": self.weights,
            "drawn": list(self.drawn),
            "streams": [asdict(stream) for stream in self._streams],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; `batch_size` and the files' folder may differ.

        Raises ConfigError, with what differs, if files, their contents, weights, shuffle or seed are others.
        """
        own = self.state_dict()
        _refuse_change("data.sampler.path", "not set", "not set" if "streams" in state else "set")
        names, names_before = ([file["name"] for file in files] for files in (own["files"], state["files"]))
        _refuse_change("data.train_files", names, names_before)
        for now, before in zip(own["files"], state["files"], strict=True):
            what = f"the number of usable prompts (num_prompts) of {now['name']}"
            _refuse_change(what, now["num_prompts"], before["num_prompts"])
            differ = [name for name, digest in now["digests"].items() if before["digests"].get(name) != digest]
            ours, theirs = (", ".join(file["digests"].get(name, "")[:12] for name in differ) for file in (now, before))
            _refuse_change(f"the digest of {', '.join(differ)} of {now['name']} (contents or order)", ours, theirs)
        _refuse_change("data.train_file_weights", own["weights"], state["weights"])
        for now, before in zip(own["streams"], state["streams"], strict=True):
            for name in ("shuffle", "seed"):
                _refuse_change(name, now[name], before[name])
        self._streams = [_Epochs(**stream) for stream in state["streams"]]
        self.drawn = list(state["drawn"])


def _refuse_change(what: str, now: object, before: object) -> None:
    if now != before:
        raise ConfigError(
            f"cannot resume the prompt order: {what} is {now} now and was {before} when it was saved; "
            f"set it back, or start a new run"
        )
