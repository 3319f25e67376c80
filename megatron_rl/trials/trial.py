"""Run `megatron-rl train` as users do: start it, stop it in the middle, start it again, end it when it hangs.

    FOLDER/run/          the run's own folder
    FOLDER/output.txt    the output of all attempts

Nightlies, ablations and profiles start their runs here. An attempt is one process from its start to its end.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.cluster.programs import supervised
from megatron_rl.errors import ConfigError
from megatron_rl.observe.loggers import METRICS_FILE
from megatron_rl.trials.trial_outcome import Attempt

RUN, OUTPUT = "run", "output.txt"
POLL_S = 0.2
GRACE_S = 20.0
"""Seconds that a stopped run has to close Ray; it saves nothing unless it is configured to."""
VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True)
class TimeLimits:
    """Seconds after which an attempt is ended.

    whole_s: from its start, whatever its progress. first_step_s: from its start without a step in its metrics. step_s:
    from one step without the next.
    """

    whole_s: float = math.inf
    first_step_s: float = math.inf
    step_s: float = math.inf

    @property
    def counts_steps(self) -> bool:
        return min(self.first_step_s, self.step_s) < math.inf

    def overrun(self, elapsed_s: float, idle_s: float, has_step: bool) -> float | None:
        """The limit that is exceeded; None for none. idle_s: seconds since the last step, or since the start.
        has_step: whether the attempt has recorded a step.
        """
        step_s = self.step_s if has_step else self.first_step_s
        if idle_s > step_s:
            return step_s
        return self.whole_s if elapsed_s > self.whole_s else None


@dataclass(frozen=True)
class Trial:
    """One run in a folder of its own, in one or more attempts. settings: `key=value` of its configuration."""

    config: Path
    folder: Path
    settings: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        """All overrides on the command line of `train`."""
        return [*self.settings, f"trainer.default_local_dir={self.run}"]

    @property
    def run(self) -> Path:
        return self.folder / RUN

    def empty(self) -> None:
        """Delete its folder, or a link in its place, and make it again."""
        if self.folder.is_symlink():
            self.folder.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def run_once(self, limits: TimeLimits, stop_after: int = 0) -> Attempt:
        """Make one more attempt, see `run_attempt`."""
        command = [sys.executable, "-m", "megatron_rl", "train", "--config", str(self.config)]
        return run_attempt([*command, *self.overrides], self.folder, limits, stop_after)

    def recorded(self) -> dict[int, dict[str, float]]:
        """Step -> metric -> value, of the steps so far."""
        return read_metrics(self.run / METRICS_FILE)


def run_attempt(command: Sequence[str], folder: Path, limits: TimeLimits, stop_after: int = 0) -> Attempt:
    """Run one process from its start to its end. No process of its family is left.

    The process gets SIGTERM once step `stop_after` is recorded (0: never), and when the whole takes too long. It gets
    SIGKILL at once when it hangs in a step. folder: a trial's, which exists.
    """
    metrics, output = folder / RUN / METRICS_FILE, folder / OUTPUT
    watches_steps = limits.counts_steps or stop_after > 0
    started = moved = time.monotonic()
    killed_before, printed_before = oom_kills(), output.stat().st_size if output.exists() else 0
    first = last = last_step(metrics)
    to_stop, overran_s = False, None
    with supervised(command, output, GRACE_S) as process:
        while process.poll() is None and overran_s is None:
            time.sleep(POLL_S)
            now, step = time.monotonic(), last_step(metrics) if watches_steps else last
            if step > last:
                moved, last = now, step
            if 0 < stop_after <= step and not to_stop:
                process.send_signal(signal.SIGTERM)
                to_stop = True
            overran_s = limits.overrun(now - started, now - moved, last > first)
        if process.poll() is not None:
            overran_s = None
        elif overran_s != limits.whole_s:
            process.kill()  # a process that hangs would not answer SIGTERM
    with output.open("rb") as file:
        file.seek(printed_before)
        text = file.read().decode(errors="replace")
    seconds, kills = time.monotonic() - started, oom_kills() - killed_before
    return Attempt(process.returncode, seconds, last_step(metrics), to_stop, overran_s, kills, text)


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Return step -> metric -> value; empty without a file. A last line that is being written is left out."""
    steps: dict[int, dict[str, float]] = {}
    lines: Sequence[str] = path.read_text().splitlines() if path.is_file() else ()
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break  # it is being written
            raise
        steps[values["step"]] = {name: value for name, value in values.items() if value is not None}
    return steps


def last_step(metrics: Path) -> int:
    """The last recorded step; 0 if there is none."""
    return max(read_metrics(metrics), default=0)


def oom_kills() -> int:
    """Processes that the kernel has killed for memory since this machine started; 0 if the kernel does not count."""
    counts = dict(line.split() for line in VMSTAT.read_text().splitlines()) if VMSTAT.is_file() else {}
    return int(counts.get("oom_kill", 0))


def require_own(folder: Path, is_own: Callable[[Path], bool], nearest: str) -> None:
    """Raise ConfigError for a folder that holds files, but not those of `is_own`. nearest: a subfolder to offer."""
    if folder.is_dir() and any(folder.iterdir()) and not is_own(folder):
        raise ConfigError(f"--folder {folder} holds files of something else; try: --folder {folder}/{nearest}")
