"""The reference's log-probs of every response, computed once before the first step and kept in every checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_rl.errors import ConfigError
from megatron_rl.records import ragged

FILE = "reference_log_probs.safetensors"


class StoredReference:
    """Log-probs of responses by the set they belong to, one row for each prompt; empty for tasks that store none.

    The constructor reads those of the checkpoint that the run resumes. Raises ConfigError if they are damaged.
    """

    def __init__(self, checkpoint: Path | None) -> None:
        self._rows: dict[str, list[torch.Tensor]] = {}
        self._answers: dict[str, str] = {}
        file = None if checkpoint is None else checkpoint / FILE
        if file is None or not file.is_file():
            return
        try:
            tensors = load_file(file)
            with safe_open(file, "pt") as opened:
                self._answers = opened.metadata() or {}
        except Exception as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        for name in {name.partition(".")[0] for name in tensors}:
            self._rows[name] = list(tensors[f"{name}.values"].split(tensors[f"{name}.sizes"].tolist()))

    def holds(self, name: str, answers: str) -> bool:
        """Whether a set of these responses is stored. answers: their digest."""
        return name in self._rows and self._answers.get(name) == answers

    def put(self, name: str, scores: Sequence[torch.Tensor], answers: str) -> None:
        """Store the log-probs [n] of each prompt's responses under the name of their set. answers: their digest."""
        self._rows[name], self._answers[name] = [row.float() for row in scores], answers

    def ragged(self, name: str, numbers: Sequence[int]) -> torch.Tensor:
        """Log-probs of some prompts of a set, float32 [G, (n)]. Raises KeyError for a set that is not stored."""
        return ragged([self._rows[name][number] for number in numbers])

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Do nothing: the log-probs do not change after the first step."""
        yield

    def write(self, folder: Path, step: int) -> list[str]:
        """Write all sets to a checkpoint's folder; returns names of the files. Raises OSError."""
        if not self._rows:
            return []
        tensors = {f"{name}.values": torch.cat(rows) for name, rows in self._rows.items()}
        tensors |= {f"{name}.sizes": torch.tensor([len(row) for row in rows]) for name, rows in self._rows.items()}
        save_file(tensors, folder / FILE, metadata=self._answers)
        return [FILE]
