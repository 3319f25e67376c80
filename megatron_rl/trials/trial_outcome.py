"""The outcome of a trial, judged by its attempts: exit codes, output, the kernel's count of kills. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from megatron_rl.errors import ConfigError, MegatronRLError, StoppedAfterStep, StoppedBeforeStep, WorkerFailure


class TrialOutcome(StrEnum):
    """How a trial ended. INTERRUPTED: it was stopped and can resume. NOT_RUN: it can run, and has not yet."""

    FINISHED = "finished"
    INVALID = "invalid"
    OUT_OF_MEMORY = "out of memory"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    INTERRUPTED = "interrupted"
    NOT_RUN = "not run"


FAILED = (TrialOutcome.OUT_OF_MEMORY, TrialOutcome.CRASHED, TrialOutcome.TIMED_OUT)
WORST_FIRST = (TrialOutcome.TIMED_OUT, TrialOutcome.INVALID, TrialOutcome.OUT_OF_MEMORY, TrialOutcome.CRASHED)
"""If several attempts failed, the first of these outcomes decides."""

OUT_OF_MEMORY = re.compile(
    r"\bOutOfMemoryError\b"  # torch's on CUDA, Ray's for a task
    r"|CUDA out of memory"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|^\s*MemoryError\b"
    r"|std::bad_alloc"
    r"|node running low on memory",  # Ray's monitor, which kills workers before the kernel does
    re.MULTILINE,
)
"""Output of a process that ran out of memory. Not "OOM killer": Ray offers that as a cause of every SIGKILL."""

OUR_ERRORS = tuple(f"{kind.__name__}: " for kind in MegatronRLError.__subclasses__())
"""Beginnings of the line that says why a run ended; a worker's traceback may follow it."""

KILLED = (WorkerFailure.exit_code, -signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a run of which the kernel may have killed a process."""

SAVED_AND_STOPPED = (StoppedAfterStep.exit_code, StoppedBeforeStep.exit_code)


@dataclass(frozen=True)
class Attempt:
    """One process of a trial, from its start to its end.

    exit_code: negative for a signal. last_step: the last step that the run had recorded by its end. to_stop: it was
    sent SIGTERM, so it should save and end. overran_s: the limit beyond which it was killed; None: it ended by itself.
    oom_kills: processes that the kernel killed for memory on this machine meanwhile. output: stdout and stderr.
    """

    exit_code: int
    seconds: float
    last_step: int = 0
    to_stop: bool = False
    overran_s: float | None = None
    oom_kills: int = 0
    output: str = ""

    @property
    def outcome(self) -> TrialOutcome:
        """The time limit comes first, as a killed process may print anything. Exit code 2 is a rule that only the run
        could check.
        """
        if self.overran_s is not None:
            return TrialOutcome.TIMED_OUT
        if self.exit_code == 0:  # also if it ended before the signal reached it
            return TrialOutcome.FINISHED
        if self.to_stop and self.exit_code in SAVED_AND_STOPPED:
            return TrialOutcome.INTERRUPTED
        if OUT_OF_MEMORY.search(self.output) or (self.oom_kills and self.exit_code in KILLED):
            return TrialOutcome.OUT_OF_MEMORY
        return TrialOutcome.INVALID if self.exit_code == ConfigError.exit_code else TrialOutcome.CRASHED

    @property
    def ending(self) -> str:
        """The exit code or the signal, in words."""
        return f"signal {-self.exit_code}" if self.exit_code < 0 else f"exit code {self.exit_code}"

    @property
    def reason(self) -> str:
        """The reason why it did not finish, in one line; empty if it did."""
        outcome = self.outcome
        if outcome is TrialOutcome.FINISHED:
            return ""
        if self.overran_s is not None:
            return f"still running after time_limit_s={self.overran_s:g}; killed"
        if outcome is TrialOutcome.OUT_OF_MEMORY:
            match = OUT_OF_MEMORY.search(self.output)
            if match is None:
                return f"{self.ending}, and the kernel killed {self.oom_kills} process(es) for memory meanwhile"
            line = self.output[: match.end()].count("\n")
            return f"{self.ending}: {self.output.splitlines()[line].strip()}"
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        lines = [line for line in lines if line.startswith(OUR_ERRORS)] or lines
        return f"{self.ending}: {lines[-1]}" if lines else self.ending

    def tail(self, num_lines: int) -> list[str]:
        """The last lines of its output."""
        return self.output.splitlines()[-num_lines:]


def outcome_of(attempts: Sequence[Attempt]) -> TrialOutcome:
    """The outcome of a trial with these attempts, in order: a failed one decides, otherwise the last one."""
    outcomes = [attempt.outcome for attempt in attempts]
    failures = [outcome for outcome in WORST_FIRST if outcome in outcomes]
    return [*failures, *reversed(outcomes), TrialOutcome.NOT_RUN][0]
