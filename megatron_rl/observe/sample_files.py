"""samples/STEP.safetensors in a run's folder: samples of a step, token by token. Numpy alone.

Legend: B recorded samples. A column of rows has B elements; a ragged column has those of all rows end to end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from megatron_rl.errors import ConfigError
from megatron_rl.observe.appended_file import replace_file

SAMPLES_FOLDER = "samples"
DETAILS, LENGTHS, GREEDY = "details", "/lengths", "greedy/"
"""The tensor of a file that holds JSON as bytes, the ending of the name of a ragged column's lengths, and the beginning
of the names of columns of greedy answers.
"""
Column = np.ndarray[Any, Any]


@dataclass(frozen=True)
class RecordedStep:
    """Samples of one step.

    num_rows: samples that the step had; B of them are here. columns: name -> values, those of `columns.COLUMNS` and
    `loss_terms`. lengths: name of a ragged column -> its elements in each row, int64 [B]. rows: of each sample its row
    of a table of samples, with index and number of its prompt's row, and the text of each token. totals: numbers of the
    whole step.
    """

    step: int
    num_rows: int
    columns: Mapping[str, Column]
    lengths: Mapping[str, Column]
    rows: list[dict[str, Any]]
    totals: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether all samples of the step are here."""
        return len(self.rows) == self.num_rows

    def of(self, name: str, row: int) -> Column | None:
        """Return a row's elements of a ragged column, or a row's single value; None if there is no such column."""
        if name not in self.columns:
            return None
        if name not in self.lengths:
            return np.asarray(self.columns[name][row])
        ends = self.lengths[name].cumsum()
        return self.columns[name][ends[row] - self.lengths[name][row] : ends[row]]


def write_step(folder: Path, recorded: RecordedStep) -> Path:
    """Write `folder/STEP.safetensors`, in place of an earlier one; returns the file. Raises OSError."""
    details = {"num_rows": recorded.num_rows, "totals": dict(recorded.totals), "rows": recorded.rows}
    text = json.dumps(details, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
    tensors = dict(recorded.columns) | {f"{name}{LENGTHS}": sizes for name, sizes in recorded.lengths.items()}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{recorded.step}.safetensors"
    contiguous = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    replace_file(file, save(contiguous | {DETAILS: np.frombuffer(text, dtype=np.uint8)}))
    return file


def read_step(file: Path) -> RecordedStep:
    """Read what `write_step` wrote. Raises ConfigError for a file that cannot be read or holds something else."""
    try:
        tensors = load_file(file)
        details = json.loads(tensors.pop(DETAILS).tobytes().decode("utf-8", "surrogatepass"))
        lengths = {name.removesuffix(LENGTHS): tensors.pop(name) for name in list(tensors) if name.endswith(LENGTHS)}
        return RecordedStep(int(file.stem), details["num_rows"], tensors, lengths, details["rows"], details["totals"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read as the samples of a step: {error}") from error


def num_recorded(file: Path) -> int:
    """Return how many samples a file has, from its header alone. Raises ConfigError as `read_step`."""
    try:
        with safe_open(file, "np") as content:
            (number,) = content.get_slice(f"input_ids{LENGTHS}").get_shape()
            return int(number)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as the samples of a step: {error}") from error


def recorded_files(run: Path) -> dict[int, Path]:
    """Step -> file of the samples in a run's folder, in order."""
    files = (run / SAMPLES_FOLDER).glob("*.safetensors")
    return dict(sorted((int(file.stem), file) for file in files if file.stem.isdigit()))


def drop_later(run: Path, last_step: int) -> None:
    """Delete the samples of steps after `last_step`, which a run that goes on takes again. Raises OSError."""
    for step, file in recorded_files(run).items():
        if step > last_step:
            file.unlink()
