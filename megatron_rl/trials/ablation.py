"""Run the points of an ablation in turn; keep a record of each, and rewrite the report after each."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.file_kinds import FILE, kind_of
from megatron_rl.errors import ConfigError
from megatron_rl.observe.appended_file import opened_to_append, replace_file
from megatron_rl.trials.ablation_file import AblationConfig
from megatron_rl.trials.ablation_report import as_csv, as_markdown
from megatron_rl.trials.points import PlannedPoint, Point, trial_of
from megatron_rl.trials.record import Record, must_run, read_record, record_of, together, write_record
from megatron_rl.trials.result import ResultRow, rows_of
from megatron_rl.trials.trial import TimeLimits, Trial, require_own
from megatron_rl.trials.trial_outcome import TrialOutcome

LOCK = ".ablation"
"""Marks a folder as an ablation's; locked while one runs in it."""
CSV, MARKDOWN, PICTURE = "ablation.csv", "ablation.md", "ablation.png"


@dataclass(frozen=True)
class Ablation:
    """An ablation in its folder. say: prints a line."""

    config: AblationConfig
    folder: Path
    planned: Sequence[PlannedPoint]
    say: Callable[[str], None]

    def trial(self, point: Point, round_: int = 0) -> Trial:
        return trial_of(point, self.config, self.folder, round_)

    def rows(self) -> list[ResultRow]:
        """One row for each point, with the numbers of its records."""
        rounds, warm_up = range(self.config.repeats), self.config.warmup_steps
        records = {
            point.name: together([read_record(self.trial(point, number).folder) for number in rounds], warm_up)
            for point in (planned.point for planned in self.planned)
        }
        return rows_of(self.planned, records, warm_up)

    def write_report(self) -> list[ResultRow]:
        """Write ablation.csv, ablation.md and, if a point has finished, ablation.png. Returns their rows."""
        from megatron_rl.trials.ablation_picture import draw_ablation  # matplotlib takes a second to load

        rows = self.rows()
        drawn = draw_ablation(rows, self.config.baseline, self.folder / PICTURE)
        if not drawn:
            (self.folder / PICTURE).unlink(missing_ok=True)
        texts = {CSV: as_csv(rows, self.config.baseline)}
        texts[MARKDOWN] = as_markdown(rows, self.config, PICTURE if drawn else None)
        for name, text in texts.items():
            replace_file(self.folder / name, text.encode(errors="backslashreplace"))
        return rows

    def run(self, retry_failed: bool = False) -> list[ResultRow]:
        """Start every point that can run and must run, the baseline first. Returns the rows of the report.

        A signal that raises (KeyboardInterrupt, SystemExit) ends the current point. It is recorded as interrupted, the
        report is written, and the exception is raised again.
        """
        valid = [planned.point for planned in self.planned if not planned.violations]
        for planned in self.planned:
            if planned.violations:
                self.say(f"{planned.point.name}: invalid, skipped: {planned.reason}")
        rows = self.write_report()
        for round_ in range(self.config.repeats):
            due = self._due(valid, round_, retry_failed)
            for number, point in enumerate(due, start=1):
                suffix = f" of round {round_ + 1}" if self.config.repeats > 1 else ""
                self.say(f"[{number}/{len(due)}{suffix}] {point.name} ...")
                self._run_point(point, round_)
                rows = self.write_report()
        return rows

    def _due(self, points: Sequence[Point], round_: int, retry_failed: bool) -> list[Point]:
        """The points to start in a round: the baseline first; every second round has the others in reverse order."""
        due = []
        for point in points:
            record = read_record(self.trial(point, round_).folder)
            if record is None or must_run(record, point, retry_failed):
                due.append(point)
            elif round_ == 0:
                retried = "" if record.outcome is TrialOutcome.FINISHED else " (--retry-failed runs it again)"
                self.say(f"{point.name}: {record.outcome} before, not repeated{retried}")
        if round_ % 2:
            due.reverse()
        due.sort(key=lambda point: point.name != self.config.baseline)
        return due

    def _run_point(self, point: Point, round_: int) -> None:
        trial = self.trial(point, round_)
        trial.empty()
        started = time.monotonic()
        try:
            attempt = trial.run_once(TimeLimits(whole_s=self.config.time_limit_s))
        except (KeyboardInterrupt, SystemExit):
            seconds = round(time.monotonic() - started, 1)
            write_record(trial.folder, Record(point.name, point.key, TrialOutcome.INTERRUPTED, seconds=seconds))
            self.write_report()
            self.say(f"  interrupted; the report is in {self.folder}, and the same command continues from here")
            raise
        record = record_of(point, trial, attempt)
        write_record(trial.folder, record)
        self.say(f"  {record.outcome} in {attempt.seconds:.0f} s{': ' if record.reason else ''}{record.reason}")


@contextmanager
def only_ablation(folder: Path) -> Iterator[None]:
    """Make the folder and lock it. Raises ConfigError if another ablation has the lock, or other files are in it."""
    require_own(folder, lambda there: kind_of(there / LOCK) == FILE, "ablation")
    folder.mkdir(parents=True, exist_ok=True)
    with opened_to_append(folder / LOCK) as file:  # what is in it stays, and a link is refused
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another ablation is at work in {folder}; try: --folder {folder}-2") from None
        yield
