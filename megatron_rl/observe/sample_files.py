"""samples/STEP.safetensors in a run's folder: samples of a step, token by token. Numpy alone.

Legend: B recorded samples. A column of rows has B elements; a ragged column has those of all rows end to end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from megatron_rl.errors import ConfigError
from megatron_rl.observe.appended_file import replace_file
from megatron_rl.plain_values import DEEPEST, is_deeper

SAMPLES_FOLDER = "samples"
STEP = re.compile(r"[0-9]{1,15}")
DETAILS, LENGTHS, GREEDY = "details", "/lengths", "greedy/"
"""The tensor of a file that holds JSON as bytes, the ending of the name of a ragged column's lengths, and the beginning
of the names of columns of greedy responses.
"""
LARGEST_TOTAL = 10**300
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
        numbers, rows, totals = details["num_rows"], details["rows"], details["totals"]
        recorded = RecordedStep(int(file.stem), numbers, tensors, lengths, rows, totals)
        _check(recorded)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{file} cannot be read as the samples of a step: {error!s:.300}") from error
    return recorded


def _check(recorded: RecordedStep) -> None:
    """Raise ValueError for a step whose details and columns do not fit each other, as no run writes one."""
    rows, totals = recorded.rows, recorded.totals
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("its rows are no list of objects")
    if type(recorded.num_rows) is not int or recorded.num_rows < len(rows):
        raise ValueError(f"num_rows is {recorded.num_rows!r:.40}, and it has {len(rows)} rows")
    if not isinstance(totals, dict) or not all(is_total(total) for total in totals.values()):
        raise ValueError("its totals are no numbers")
    if is_deeper(rows, DEEPEST):
        raise ValueError(f"its rows are more than {DEEPEST} levels deep")
    for name, sizes in recorded.lengths.items():
        is_count = sizes.ndim == 1 and sizes.dtype.kind in "iu" and bool((sizes >= 0).all())
        if name not in recorded.columns or not is_count or int(sizes.sum()) != len(recorded.columns[name]):
            raise ValueError(f"{name!r:.40} does not have the number of elements that its lengths give")
    for name, values in (dict(recorded.columns) | dict(recorded.lengths)).items():
        if not name.startswith(GREEDY) and values.shape[:1] != (len(rows),):
            raise ValueError(f"{name!r:.40} does not have {len(rows)} rows")


def is_total(value: object) -> bool:
    """Whether a value of JSON is a number that a float can hold; NaN and infinities are."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < LARGEST_TOTAL)


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
    return dict(sorted((int(file.stem), file) for file in files if STEP.fullmatch(file.stem) and file.is_file()))


def drop_later(run: Path, last_step: int) -> None:
    """Delete the samples of steps after `last_step`, which a run that continues takes again. Raises OSError."""
    for step, file in recorded_files(run).items():
        if step > last_step:
            file.unlink()
