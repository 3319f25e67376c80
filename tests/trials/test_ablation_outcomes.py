"""How the end of a run is read: from its exit code, its last words and the kernel's count."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.trials.outcome import Ending, Outcome, outcome_of, reason_of

REPOSITORY = Path(__file__).parents[2]
CPU_TEXT = "[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
RAY_KILLED = "(1) the process was killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force"


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (Ending(0, 9.0, ""), Outcome.FINISHED),
        (Ending(0, 9.0, "a caught torch.OutOfMemoryError"), Outcome.FINISHED),
        (Ending(1, 9.0, "Traceback"), Outcome.CRASHED),
        (Ending(3, 9.0, "WorkerFailure: rank 1"), Outcome.CRASHED),
        (Ending(2, 9.0, "ConfigError: no"), Outcome.INVALID),
        (Ending(-9, 9.0, ""), Outcome.CRASHED),
        (Ending(0, 9.0, "", timed_out=True), Outcome.TIMED_OUT),
        (Ending(-9, 9.0, "CUDA out of memory", timed_out=True), Outcome.TIMED_OUT),
        (Ending(3, 9.0, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"), Outcome.OUT_OF_MEMORY),
        (Ending(3, 9.0, f"RuntimeError: {CPU_TEXT}"), Outcome.OUT_OF_MEMORY),
        (Ending(1, 9.0, "Traceback\n  x\nMemoryError\n"), Outcome.OUT_OF_MEMORY),
        (Ending(3, 9.0, "Task was killed due to the node running low on memory."), Outcome.OUT_OF_MEMORY),
        (Ending(3, 9.0, RAY_KILLED), Outcome.CRASHED),
        (Ending(3, 9.0, RAY_KILLED, oom_kills=1), Outcome.OUT_OF_MEMORY),
        (Ending(-9, 9.0, "", oom_kills=1), Outcome.OUT_OF_MEMORY),
        (Ending(4, 9.0, "RewardError", oom_kills=1), Outcome.CRASHED),
        (Ending(0, 9.0, "", oom_kills=1), Outcome.FINISHED),
    ],
)
def test_outcomes(ending, expected):
    """Ray names the OOM killer as a possible cause of every SIGKILL, so only the kernel's count makes it one.

    Would not catch a kill on another machine, nor another program's on this one while a worker died by itself.
    """
    assert outcome_of(ending) is expected


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (Ending(0, 9.0, "well"), ""),
        (Ending(3, 9.0, "a\nWorkerFailure: rank 1 \n\n"), "exit code 3: WorkerFailure: rank 1"),
        (Ending(3, 9.0, "WorkerFailure: rank 1\nTraceback\nValueError: x"), "exit code 3: WorkerFailure: rank 1"),
        (Ending(1, 9.0, "Traceback\nValueError: x"), "exit code 1: ValueError: x"),
        (Ending(-9, 9.0, ""), "signal 9"),
        (Ending(3, 9.0, "a\n  MemoryError: x\nb"), "exit code 3: MemoryError: x"),
        (Ending(-9, 9.0, "", oom_kills=2), "signal 9, and the kernel killed 2 process(es) for memory meanwhile"),
        (Ending(-15, 70.0, "x", timed_out=True), "still running after time_limit_s=60; killed"),
    ],
)
def test_reasons(ending, expected):
    """One line. Would not catch one that says less than the output."""
    assert reason_of(ending, outcome_of(ending), 60.0) == expected


def test_outcomes_are_documented():
    """Would not catch one that is explained wrongly."""
    page = (REPOSITORY / "docs/ablations.md").read_text()
    assert all(f"| {outcome} |" in page for outcome in Outcome)
