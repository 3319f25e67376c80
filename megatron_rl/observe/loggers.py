"""Backends of a step's metrics: a line on the console, a line of JSON, TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.observe.appended_file import AppendedFile, replace_file
from megatron_rl.observe.step_line import step_line
from megatron_rl.observe.summary import finite_or_null
from megatron_rl.observe.terminal import Terminal

if TYPE_CHECKING:
    from megatron_rl.observe.tensorboard import EventFile

METRICS_FILE = "metrics.jsonl"


class JsonlBackend:
    """Writes one JSON object per line, with "step" first, as soon as it is logged.

    Lines that cannot be written wait, and are written with the next one, or at the end.
    """

    def __init__(self, file: Path, resumed_step: int | None = None):
        """Start a new `file`, or keep its lines of steps <= `resumed_step`: a resumed run repeats later ones.

        Raises OSError.
        """
        kept = [] if resumed_step is None or not file.is_file() else _lines_until(file, resumed_step)
        _replace_lines(file, kept)
        self._resumed_step = resumed_step
        self._file = AppendedFile(file)
        self._waiting = b""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append the line of `step`; floats that are not finite become null. Raises OSError where the line must wait.

        The step that the run resumed from has a line: its metrics are added there.
        """
        line = {"step": step, **{name: float(value) for name, value in metrics.items()}}
        if step == self._resumed_step:
            self._complete(line)
            return
        self._waiting += json.dumps(finite_or_null(line), allow_nan=False).encode() + b"\n"
        self._write()

    def close(self) -> None:
        """Close the file. Raises OSError where lines still could not be written."""
        try:
            self._write()
        finally:
            self._file.close()

    def _complete(self, line: dict[str, float]) -> None:
        others = self._file.path.read_text().splitlines()
        before = json.loads(others.pop()) if others else {}
        if before.get("step") not in (None, line["step"]):
            others, before = [*others, json.dumps(before)], {}
        _replace_lines(self._file.path, [*others, json.dumps(finite_or_null(before | line), allow_nan=False)])

    def _write(self) -> None:
        if self._waiting:
            self._file.append(self._waiting)
            self._waiting = b""


def _replace_lines(file: Path, lines: Sequence[str]) -> None:
    replace_file(file, "".join(line + "\n" for line in lines).encode())


def _lines_until(file: Path, last_step: int) -> list[str]:
    """The lines of steps <= `last_step`, without those that a kill has cut off."""
    kept = []
    for line in file.read_text(errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= last_step:
                kept.append(line)
        except (ValueError, RecursionError, TypeError, KeyError):
            continue
    return kept


class MetricLogger(AbstractContextManager["MetricLogger"]):
    """Sends the metrics of each step to all `backends`. A context manager."""

    def __init__(
        self,
        backends: Sequence[str],
        directory: Path,
        console: Terminal | None = None,
        resumed_step: int | None = None,
        line: Callable[[Mapping[str, float], int], str] = step_line,
    ):
        """Create `directory` and in it metrics.jsonl ("jsonl") and tensorboard/ ("tensorboard").

        Pass the progress bar's `console` so that lines appear above it. resumed_step: the step that the run resumes
        from; lines until then are kept, later ones dropped. None: all files are new. Names of `Services` in `backends`
        mean nothing here. line: the console's line of a step, in rich's markup. Raises OSError where metrics.jsonl
        cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._console = console or Terminal()
        self._waiting_since: int | None = None
        # Files come first: what is on the disk does not depend on who reads what is printed.
        self._jsonl = JsonlBackend(directory / METRICS_FILE, resumed_step) if "jsonl" in backends else None
        self._tensorboard: EventFile | None = None
        if "tensorboard" in backends:
            from megatron_rl.observe.tensorboard import EventFile  # slow to import, and only needed here

            with self._dropping_tensorboard():
                first_step = 0 if resumed_step is None else resumed_step + 1
                self._tensorboard = EventFile(directory / "tensorboard", first_step)
        self._line = line if "console" in backends else None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record `metrics` (verl's names) of `step`; step 0 is the state before training.

        A file that cannot be written does not end the run: there is one warning, metrics.jsonl catches up when it can,
        and TensorBoard is dropped.
        """
        if self._jsonl is not None:
            self._log_line(self._jsonl, metrics, step)
        if self._tensorboard is not None:
            with self._dropping_tensorboard():
                self._tensorboard.log(metrics, step)
        if self._line is not None:
            self._console.print(self._line(metrics, step), highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Write out and release everything."""
        if self._jsonl is not None:
            try:
                self._jsonl.close()
            except OSError as error:
                self._warn(f"{METRICS_FILE} is missing the lines from step {self._waiting_since} on: {error}")
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _log_line(self, jsonl: JsonlBackend, metrics: Mapping[str, float], step: int) -> None:
        try:
            jsonl.log(metrics, step)
        except OSError as error:
            if self._waiting_since is None:
                self._waiting_since = step
                self._warn(
                    f"{METRICS_FILE} cannot be written: {error}; training continues, and lines wait until it can"
                )
            return
        if self._waiting_since is not None:
            self._warn(f"{METRICS_FILE} is written again, with all lines from step {self._waiting_since} on")
            self._waiting_since = None

    @contextmanager
    def _dropping_tensorboard(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._tensorboard = None
            self._warn(f"TensorBoard gets no more events of this run: {error}")

    def _warn(self, text: str) -> None:
        self._console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def __exit__(self, *failure: object) -> None:
        """Close, also after an error."""
        self.close()
