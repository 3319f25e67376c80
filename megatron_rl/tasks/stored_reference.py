"""What the reference says of every answer, computed once before the first step and kept in every checkpoint."""

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
    """Log-probs of answers by the set they belong to, one row for each prompt; nothing where no stage needs them.

    Constructing it reads those of the checkpoint that the run goes on from. Raises ConfigError where they are damaged.
    """

    def __init__(self, checkpoint: Path | None) -> None:
        self._rows: dict[str, list[torch.Tensor]] = {}
        self._answers: dict[str, str] = {}
        file = None if checkpoint is None else checkpoint / FILE
        if file is None or not file.is_file():
            return
        try:
            found = load_file(file)
            with safe_open(file, "pt") as opened:
                self._answers = opened.metadata() or {}
        except Exception as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        for name in {name.partition(".")[0] for name in found}:
            self._rows[name] = list(found[f"{name}.values"].split(found[f"{name}.sizes"].tolist()))

    def holds(self, name: str, answers: str) -> bool:
        """Whether a set was put, of these answers."""
        return name in self._rows and self._answers.get(name) == answers

    def put(self, name: str, scores: Sequence[torch.Tensor], answers: str) -> None:
        """Keep the log-probs [n] of each prompt's answers under the name of their set. answers: a digest of these."""
        self._rows[name], self._answers[name] = [one.float() for one in scores], answers

    def ragged(self, name: str, numbers: Sequence[int]) -> torch.Tensor:
        """Those of some prompts of a set, float32 [G, (n)]. Raises KeyError for one that was not put."""
        return ragged([self._rows[name][number] for number in numbers])

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Round a checkpoint: nothing changes here after the first step."""
        yield

    def write(self, folder: Path, step: int) -> list[str]:
        """Write all of it to a checkpoint's folder; names of the files. Raises OSError."""
        if not self._rows:
            return []
        tensors = {f"{name}.values": torch.cat(rows) for name, rows in self._rows.items()}
        tensors |= {f"{name}.sizes": torch.tensor([len(row) for row in rows]) for name, rows in self._rows.items()}
        save_file(tensors, folder / FILE, metadata=self._answers)
        return [FILE]
