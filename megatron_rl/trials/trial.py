"""Run `megatron-rl train` as its users do: start it, stop it in the middle, start it again, end it when it hangs.

    FOLDER/run/          the run's own folder
    FOLDER/output.txt    what its lives printed

Nightlies and ablations start all their processes here, and judge the lives that come back.
"""

from __future__ import annotations

import math
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.errors import ConfigError
from megatron_rl.observe.loggers import METRICS_FILE
from megatron_rl.trials.metrics_file import read_metrics
from megatron_rl.trials.process import living
from megatron_rl.trials.trial_outcome import Life

RUN, OUTPUT = "run", "output.txt"
POLL_S = 0.2
GRACE_S = 20.0
"""What a life that is stopped has to close Ray; it saves nothing unless it is configured to."""
VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True)
class Patience:
    """Seconds beyond which a life is ended.

    whole_s: from its start, however well it goes on; first_step_s, step_s: without a further step in its metrics,
    at its start and later.
    """

    whole_s: float = math.inf
    first_step_s: float = math.inf
    step_s: float = math.inf

    @property
    def counts_steps(self) -> bool:
        return min(self.first_step_s, self.step_s) < math.inf

    def overrun(self, lived_s: float, stood_s: float, moved: bool) -> float | None:
        """The limit that is overrun after so many seconds, so many of them without a step; None where none is."""
        step_s = self.step_s if moved else self.first_step_s
        if stood_s > step_s:
            return step_s
        return self.whole_s if lived_s > self.whole_s else None


@dataclass(frozen=True)
class Trial:
    """One run in a folder of its own, whatever the number of its lives. settings: `key=value` of its configuration."""

    config: Path
    folder: Path
    settings: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        """All that `train` is told on the command line."""
        return [*self.settings, f"trainer.default_local_dir={self.run}"]

    @property
    def run(self) -> Path:
        return self.folder / RUN

    def empty(self) -> None:
        """Make its folder anew; what is in it is lost."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def live(self, patience: Patience, stop_after: int = 0) -> Life:
        """One more life, see `live`."""
        command = [sys.executable, "-m", "megatron_rl", "train", "--config", str(self.config)]
        return live([*command, *self.overrides], self.folder, patience, stop_after)

    def recorded(self) -> dict[int, dict[str, float]]:
        """Step -> metric -> value, as far as it came."""
        return read_metrics(self.run / METRICS_FILE)


def live(command: Sequence[str], folder: Path, patience: Patience, stop_after: int = 0) -> Life:
    """One process from its start to its end; no process of its family is left.

    It gets SIGTERM once step `stop_after` is recorded (0: never), and when the whole takes too long; SIGKILL at once
    when it hangs in a step. `folder` is a trial's and exists.
    """
    metrics, output = folder / RUN / METRICS_FILE, folder / OUTPUT
    watches_steps = patience.counts_steps or stop_after > 0
    started = moved = time.monotonic()
    killed_before, printed_before = oom_kills(), output.stat().st_size if output.exists() else 0
    first = last = last_step(metrics)
    to_stop, overran_s = False, None
    with living(command, output, GRACE_S) as process:
        while process.poll() is None and overran_s is None:
            time.sleep(POLL_S)
            now, step = time.monotonic(), last_step(metrics) if watches_steps else last
            if step > last:
                moved, last = now, step
            if 0 < stop_after <= step and not to_stop:
                process.send_signal(signal.SIGTERM)
                to_stop = True
            overran_s = patience.overrun(now - started, now - moved, last > first)
        if process.poll() is not None:
            overran_s = None
        elif overran_s != patience.whole_s:
            process.kill()  # what hangs would not answer SIGTERM
    with output.open("rb") as file:
        file.seek(printed_before)
        text = file.read().decode(errors="replace")
    seconds, kills = time.monotonic() - started, oom_kills() - killed_before
    return Life(process.returncode, seconds, last_step(metrics), to_stop, overran_s, kills, text)


def last_step(metrics: Path) -> int:
    """0 where none is recorded."""
    return max(read_metrics(metrics), default=0)


def oom_kills() -> int:
    """Processes that the kernel has killed for memory since this machine started; 0 where it does not count."""
    counts = dict(line.split() for line in VMSTAT.read_text().splitlines()) if VMSTAT.is_file() else {}
    return int(counts.get("oom_kill", 0))


def require_own(folder: Path, sign: str, nearest: str) -> None:
    """Raises ConfigError for a folder with files in it of which none is `sign`; `nearest`: a name inside to offer."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / sign).is_file():
        raise ConfigError(f"--folder {folder} holds files of something else; nearest: --folder {folder}/{nearest}")
