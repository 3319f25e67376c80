"""Where the metrics of a step go: a line on the console, a line of JSON, TensorBoard."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console

from megatron_rl.errors import ConfigError
from megatron_rl.observe.summary import finite_or_null

BACKENDS = ("console", "jsonl", "tensorboard")
VALIDATION_PREFIX = "val-core/"
CONSOLE_FIELDS = (
    ("critic/score/mean", "reward", ".3f"),
    ("actor/reward_kl_penalty", "kl", ".4f"),
    ("actor/entropy", "entropy", ".3f"),
    ("actor/pg_loss", "pg_loss", "+.4f"),
    ("actor/pg_clipfrac", "clip", ".1%"),
    ("actor/grad_norm", "grad", ".2f"),
    ("critic/vf_loss", "vf_loss", ".4f"),
    ("response_length/mean", "length", ".1f"),
    ("training/rollout_logprob_diff_max", "rollout_diff", ".0e"),
    ("perf/throughput", "tok/s/rank", ".0f"),
    ("timing_s/step", "seconds", ".1f"),
)


class Backend(Protocol):
    """One destination of metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of `step`."""

    def close(self) -> None:
        """Write out what is buffered and release files."""


class ConsoleBackend:
    """One line per step with the metrics a reader looks at first; absent ones are left out."""

    def __init__(self, console: Console):
        """Print on `console`: above the progress bar when the bar uses the same one."""
        self._console = console

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Print the line of `step`."""
        parts = [f"[bold]step {step:>4}[/]"]
        for name, value in metrics.items():
            if name.startswith(VALIDATION_PREFIX) and not name.endswith("/std"):
                parts.append(f"[green]{name.removeprefix(VALIDATION_PREFIX)} {value:.3f}[/]")
        for name, label, form in CONSOLE_FIELDS:
            if name in metrics:
                parts.append(f"[dim]{label}[/] {metrics[name]:{form}}")
        self._console.print("  ".join(parts), highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing to release."""


class JsonlBackend:
    """One JSON object per line, with "step" first; a line is on disk as soon as it is logged."""

    def __init__(self, file: Path, resumed_step: int | None = None):
        """Start `file` anew, or after its lines of steps <= `resumed_step`: a run that goes on repeats the others."""
        kept = [] if resumed_step is None or not file.exists() else _lines_until(file, resumed_step)
        # At one instant, so that a kill loses no line.
        unfinished = file.with_name(file.name + ".unfinished")
        unfinished.write_text("".join(line + "\n" for line in kept))
        unfinished.replace(file)
        self._file = file.open("a")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append the line of `step`; floats that are not finite become null."""
        line = {"step": step, **{name: float(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(finite_or_null(line), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lines_until(file: Path, last_step: int) -> list[str]:
    """The lines of steps <= `last_step`, without what a kill has torn."""
    kept = []
    for line in file.read_text(errors="replace").splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, TypeError, KeyError):
            continue
        if step <= last_step:
            kept.append(line)
    return kept


class TensorBoardBackend:
    """Scalars for TensorBoard."""

    def __init__(self, folder: Path, resumed_step: int | None = None):
        """Write events to `folder`; those of an earlier run there are hidden, but not of steps <= `resumed_step`."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only this backend needs it

        self._writer = SummaryWriter(str(folder), purge_step=0 if resumed_step is None else resumed_step + 1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the scalars of `step`."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write the events out."""
        self._writer.close()


class MetricLogger:
    """Sends the metrics of each step to all `backends`. A context manager."""

    def __init__(
        self,
        backends: Sequence[str],
        directory: Path,
        console: Console | None = None,
        resumed_step: int | None = None,
    ):
        """Create `directory` and in it metrics.jsonl ("jsonl") and tensorboard/ ("tensorboard").

        Pass the progress bar's `console` so that lines appear above it. resumed_step: the step whose state the run goes
        on from; what was logged until then is kept, later steps are dropped. None: all is started anew. Raises
        ConfigError for an unknown backend.
        """
        for name in backends:
            if name not in BACKENDS:
                close = difflib.get_close_matches(name, BACKENDS, n=1, cutoff=0.0)
                raise ConfigError(
                    f"trainer.logger names {name!r}: choose among {', '.join(BACKENDS)}; the nearest is {close[0]!r}"
                )
        directory.mkdir(parents=True, exist_ok=True)
        self._backends: list[Backend] = []
        if "console" in backends:
            self._backends.append(ConsoleBackend(console or Console()))
        if "jsonl" in backends:
            self._backends.append(JsonlBackend(directory / "metrics.jsonl", resumed_step))
        if "tensorboard" in backends:
            self._backends.append(TensorBoardBackend(directory / "tensorboard", resumed_step))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record `metrics` (verl's names) of `step`; step 0 is the state before training."""
        for backend in self._backends:
            backend.log(metrics, step)

    def close(self) -> None:
        """Write out and release everything."""
        for backend in self._backends:
            backend.close()

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, also after an error."""
        self.close()
