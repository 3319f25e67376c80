"""How a trial ended, judged by its lives: exit codes, what they printed, the kernel's count of kills. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from megatron_rl.errors import ConfigError, MegatronRLError, StoppedAfterStep, StoppedBeforeStep, WorkerFailure


class TrialOutcome(StrEnum):
    """What a trial comes to. INTERRUPTED: it was told to stop, and can go on. NOT_RUN: it can, and has not yet."""

    FINISHED = "finished"
    INVALID = "invalid"
    OUT_OF_MEMORY = "out of memory"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    INTERRUPTED = "interrupted"
    NOT_RUN = "not run"


FAILED = (TrialOutcome.OUT_OF_MEMORY, TrialOutcome.CRASHED, TrialOutcome.TIMED_OUT)
WORST_FIRST = (TrialOutcome.TIMED_OUT, TrialOutcome.INVALID, TrialOutcome.OUT_OF_MEMORY, TrialOutcome.CRASHED)
"""Which life decides where several ended ill."""

OUT_OF_MEMORY = re.compile(
    r"\bOutOfMemoryError\b"  # torch's on CUDA, Ray's for a task
    r"|CUDA out of memory"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|^\s*MemoryError\b"
    r"|std::bad_alloc"
    r"|node running low on memory",  # Ray's monitor, which kills workers before the kernel does
    re.MULTILINE,
)
"""What is printed where memory was lacking. Not "OOM killer": Ray offers that as a cause of every SIGKILL."""

OUR_ERRORS = tuple(f"{kind.__name__}: " for kind in MegatronRLError.__subclasses__())
"""How a line begins that says why a run ended; a worker's traceback may follow it."""

KILLED = (WorkerFailure.exit_code, -signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a run one of whose processes the kernel may have killed."""

SAVED_AND_STOPPED = (StoppedAfterStep.exit_code, StoppedBeforeStep.exit_code)


@dataclass(frozen=True)
class Life:
    """One process of a trial, from its start to its end.

    exit_code: negative for a signal. last_step: that the run had recorded by then. to_stop: it was sent SIGTERM, so
    that ending saved is right. overran_s: the limit beyond which it was killed; None: it ended by itself. oom_kills:
    by the kernel on this machine meanwhile. output: what it printed.
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
        """Time first: what was killed prints what it likes. Exit code 2 is a rule that only the run could check."""
        if self.overran_s is not None:
            return TrialOutcome.TIMED_OUT
        if self.exit_code == 0:  # also where it ended before it saw the signal
            return TrialOutcome.FINISHED
        if self.to_stop and self.exit_code in SAVED_AND_STOPPED:
            return TrialOutcome.INTERRUPTED
        if OUT_OF_MEMORY.search(self.output) or (self.oom_kills and self.exit_code in KILLED):
            return TrialOutcome.OUT_OF_MEMORY
        return TrialOutcome.INVALID if self.exit_code == ConfigError.exit_code else TrialOutcome.CRASHED

    @property
    def ending(self) -> str:
        """Its exit code or its signal."""
        return f"signal {-self.exit_code}" if self.exit_code < 0 else f"exit code {self.exit_code}"

    @property
    def reason(self) -> str:
        """One line for a report: why it did not finish; empty where it did."""
        outcome = self.outcome
        if outcome is TrialOutcome.FINISHED:
            return ""
        if self.overran_s is not None:
            return f"still running after time_limit_s={self.overran_s:g}; killed"
        found = OUT_OF_MEMORY.search(self.output)
        if outcome is TrialOutcome.OUT_OF_MEMORY and found is None:
            return f"{self.ending}, and the kernel killed {self.oom_kills} process(es) for memory meanwhile"
        if outcome is TrialOutcome.OUT_OF_MEMORY and found is not None:
            line = self.output[: found.end()].count("\n")
            return f"{self.ending}: {self.output.splitlines()[line].strip()}"
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith(OUR_ERRORS)] or lines
        return f"{self.ending}: {said[-1]}" if said else self.ending

    def tail(self, num_lines: int) -> list[str]:
        """The end of what it printed."""
        return self.output.splitlines()[-num_lines:]


def outcome_of(lives: Sequence[Life]) -> TrialOutcome:
    """Of a trial with these lives, the first one first; a life that ended ill decides, otherwise the last one."""
    outcomes = [life.outcome for life in lives]
    ill = [outcome for outcome in WORST_FIRST if outcome in outcomes]
    return [*ill, *reversed(outcomes), TrialOutcome.NOT_RUN][0]
