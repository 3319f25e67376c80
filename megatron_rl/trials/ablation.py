"""Run an ablation's points one after the other, keep a record of each, and write the report anew after each."""

from __future__ import annotations

import fcntl
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.errors import ConfigError
from megatron_rl.trials.ablation_file import AblationConfig
from megatron_rl.trials.outcome import Ending, Outcome, outcome_of, reason_of
from megatron_rl.trials.planned import RUN, PlannedPoint, point_folder, run_overrides
from megatron_rl.trials.points import Point
from megatron_rl.trials.process import living
from megatron_rl.trials.record import (
    NUM_TAIL_LINES,
    OUTPUT,
    Record,
    must_run,
    read_record,
    recorded_numbers,
    write_record,
)
from megatron_rl.trials.result import Row, rows_of
from megatron_rl.trials.table import as_csv, as_markdown

LOCK = ".ablation"
"""Marks a folder as an ablation's; locked while one runs in it."""
CSV, MARKDOWN, PICTURE = "ablation.csv", "ablation.md", "ablation.png"
POLL_S = 0.2
GRACE_S = 20.0
"""What a run that is stopped has to close Ray; it saves nothing unless it is configured to."""
VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True)
class Ablation:
    """One ablation at work. say: prints a line."""

    config: AblationConfig
    folder: Path
    planned: Sequence[PlannedPoint]
    say: Callable[[str], None]

    def rows(self) -> list[Row]:
        """Every point, with what its record says."""
        points = [planned.point for planned in self.planned]
        records = {point.name: read_record(point_folder(self.folder, point)) for point in points}
        return rows_of(self.planned, records, self.config.warmup_steps)

    def write_report(self) -> list[Row]:
        """ablation.csv, ablation.md and, where something has finished, ablation.png; the rows in them."""
        from megatron_rl.trials.picture import draw_ablation  # matplotlib takes a second to load

        rows = self.rows()
        drawn = draw_ablation(rows, self.config.baseline, self.folder / PICTURE)
        if not drawn:
            (self.folder / PICTURE).unlink(missing_ok=True)
        (self.folder / CSV).write_text(as_csv(rows, self.config.baseline))
        (self.folder / MARKDOWN).write_text(as_markdown(rows, self.config, PICTURE if drawn else None))
        return rows

    def run(self, retry_failed: bool = False) -> list[Row]:
        """Start every point that can run and has no record that stands, the baseline first; the rows of the report.

        A signal that raises (KeyboardInterrupt, SystemExit) ends the point that runs, which is recorded as interrupted,
        writes the report, and is raised on.
        """
        valid = [planned.point for planned in self.planned if not planned.violations]
        for planned in self.planned:
            if planned.violations:
                self.say(f"{planned.point.name}: invalid, skipped: {planned.reason}")
        due = []
        for point in valid:
            record = read_record(point_folder(self.folder, point))
            if must_run(record, point, retry_failed):
                due.append(point)
            else:
                retried = "" if record.outcome is Outcome.FINISHED else " (--retry-failed runs it again)"
                self.say(f"{point.name}: {record.outcome} before, not repeated{retried}")
        due.sort(key=lambda point: point.name != self.config.baseline)
        rows = self.write_report()
        for number, point in enumerate(due, start=1):
            self.say(f"[{number}/{len(due)}] {point.name} ...")
            self._run_point(point)
            rows = self.write_report()
        return rows

    def _run_point(self, point: Point) -> None:
        folder = point_folder(self.folder, point)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "megatron_rl", "train", "--config", self.config.config]
        started = time.monotonic()
        try:
            ending = live([*command, *run_overrides(point, self.folder)], folder / OUTPUT, self.config.time_limit_s)
        except (KeyboardInterrupt, SystemExit):
            seconds = round(time.monotonic() - started, 1)
            write_record(folder, Record(point.name, point.key, Outcome.INTERRUPTED, seconds=seconds))
            self.write_report()
            self.say(f"  interrupted; the report is in {self.folder}, and the same command goes on from here")
            raise
        outcome = outcome_of(ending)
        reason = reason_of(ending, outcome, self.config.time_limit_s)
        record = Record(
            point.name,
            point.key,
            outcome,
            reason,
            ending.exit_code,
            round(ending.seconds, 1),
            point.settings,
            **recorded_numbers(folder / RUN),
            tail=[] if outcome is Outcome.FINISHED else ending.output.splitlines()[-NUM_TAIL_LINES:],
        )
        write_record(folder, record)
        self.say(f"  {outcome} in {ending.seconds:.0f} s{': ' if reason else ''}{reason}")


def live(command: Sequence[str], output: Path, time_limit_s: float) -> Ending:
    """One process from its start to its end, or to its time limit; no process of its family is left."""
    started, killed_before = time.monotonic(), oom_kills()
    timed_out = False
    with living(command, output, GRACE_S) as process:
        while process.poll() is None and not timed_out:
            time.sleep(POLL_S)
            timed_out = time.monotonic() - started > time_limit_s
        timed_out = process.poll() is None
    text = output.read_text(errors="replace")
    return Ending(process.returncode, time.monotonic() - started, text, timed_out, oom_kills() - killed_before)


def oom_kills() -> int:
    """Processes that the kernel has killed for memory since this machine started; 0 where it does not count."""
    counts = dict(line.split() for line in VMSTAT.read_text().splitlines()) if VMSTAT.is_file() else {}
    return int(counts.get("oom_kill", 0))


@contextmanager
def only_ablation(folder: Path) -> Iterator[None]:
    """Make the folder and keep other ablations out of it. Raises ConfigError where one is in it, or something else."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / LOCK).exists():
        raise ConfigError(f"--folder {folder} holds files of something else; nearest: --folder {folder}/ablation")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another ablation is at work in {folder}; nearest: --folder {folder}-2") from None
        yield
