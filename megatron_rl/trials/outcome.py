"""How one run ended, judged by its exit code, what it printed, and the kernel's count of processes it killed. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import StrEnum

from megatron_rl.errors import ConfigError, MegatronRLError, WorkerFailure


class Outcome(StrEnum):
    """What a point comes to. NOT_RUN: it can, and has not yet, or not as it is configured."""

    FINISHED = "finished"
    INVALID = "invalid"
    OUT_OF_MEMORY = "out of memory"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"
    INTERRUPTED = "interrupted"
    NOT_RUN = "not run"


FAILED = (Outcome.OUT_OF_MEMORY, Outcome.CRASHED, Outcome.TIMED_OUT)

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


@dataclass(frozen=True)
class Ending:
    """The end of one run. exit_code: negative for a signal. oom_kills: by the kernel on this machine meanwhile."""

    exit_code: int
    seconds: float
    output: str
    timed_out: bool = False
    oom_kills: int = 0


def outcome_of(ending: Ending) -> Outcome:
    """Time first: a run that was killed prints what it likes. Exit code 2 is a rule that only the run could check."""
    if ending.timed_out:
        return Outcome.TIMED_OUT
    if ending.exit_code == 0:
        return Outcome.FINISHED
    if OUT_OF_MEMORY.search(ending.output) or (ending.oom_kills and ending.exit_code in KILLED):
        return Outcome.OUT_OF_MEMORY
    if ending.exit_code == ConfigError.exit_code:
        return Outcome.INVALID
    return Outcome.CRASHED


def reason_of(ending: Ending, outcome: Outcome, time_limit_s: float) -> str:
    """One line for the report; empty for a run that finished."""
    if outcome is Outcome.FINISHED:
        return ""
    if outcome is Outcome.TIMED_OUT:
        return f"still running after time_limit_s={time_limit_s:g}; killed"
    signed = f"signal {-ending.exit_code}" if ending.exit_code < 0 else f"exit code {ending.exit_code}"
    found = OUT_OF_MEMORY.search(ending.output)
    if outcome is Outcome.OUT_OF_MEMORY and found is None:
        return f"{signed}, and the kernel killed {ending.oom_kills} process(es) for memory meanwhile"
    if outcome is Outcome.OUT_OF_MEMORY and found is not None:
        line = ending.output[: found.end()].count("\n")
        return f"{signed}: {ending.output.splitlines()[line].strip()}"
    lines = [line.strip() for line in ending.output.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(OUR_ERRORS)] or lines
    return f"{signed}: {said[-1]}" if said else signed
