"""How the end of a run is read: from its exit code, its last words and the kernel's count."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.trials.trial_outcome import Attempt, TrialOutcome, outcome_of

REPOSITORY = Path(__file__).parents[2]
CPU_TEXT = "[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
RAY_KILLED = "(1) the process was killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force"


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        (Attempt(0, 9.0), TrialOutcome.FINISHED),
        (Attempt(0, 9.0, output="a caught torch.OutOfMemoryError"), TrialOutcome.FINISHED),
        (Attempt(1, 9.0, output="Traceback"), TrialOutcome.CRASHED),
        (Attempt(3, 9.0, output="WorkerFailure: rank 1"), TrialOutcome.CRASHED),
        (Attempt(2, 9.0, output="ConfigError: no"), TrialOutcome.INVALID),
        (Attempt(-9, 9.0), TrialOutcome.CRASHED),
        (Attempt(0, 9.0, overran_s=60.0), TrialOutcome.TIMED_OUT),
        (Attempt(-9, 9.0, output="CUDA out of memory", overran_s=60.0), TrialOutcome.TIMED_OUT),
        (Attempt(3, 9.0, output="torch.OutOfMemoryError: CUDA out of memory. Tried to"), TrialOutcome.OUT_OF_MEMORY),
        (Attempt(3, 9.0, output=f"RuntimeError: {CPU_TEXT}"), TrialOutcome.OUT_OF_MEMORY),
        (Attempt(1, 9.0, output="Traceback\n  x\nMemoryError\n"), TrialOutcome.OUT_OF_MEMORY),
        (Attempt(3, 9.0, output="Task was killed due to the node running low on memory."), TrialOutcome.OUT_OF_MEMORY),
        (Attempt(3, 9.0, output=RAY_KILLED), TrialOutcome.CRASHED),
        (Attempt(3, 9.0, output=RAY_KILLED, oom_kills=1), TrialOutcome.OUT_OF_MEMORY),
        (Attempt(-9, 9.0, oom_kills=1), TrialOutcome.OUT_OF_MEMORY),
        (Attempt(4, 9.0, output="RewardError", oom_kills=1), TrialOutcome.CRASHED),
        (Attempt(0, 9.0, oom_kills=1), TrialOutcome.FINISHED),
    ],
)
def test_outcomes(attempt, expected):
    """Ray names the OOM killer as a possible cause of every SIGKILL, so only the kernel's count makes it one.

    Would not catch a kill on another machine, nor another program's on this one while a worker died by itself.
    """
    assert attempt.outcome is expected and outcome_of([attempt]) is expected


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        (Attempt(0, 9.0, output="well"), ""),
        (Attempt(3, 9.0, output="a\nWorkerFailure: rank 1 \n\n"), "exit code 3: WorkerFailure: rank 1"),
        (
            Attempt(3, 9.0, output="WorkerFailure: rank 1\nTraceback\nValueError: x"),
            "exit code 3: WorkerFailure: rank 1",
        ),
        (Attempt(1, 9.0, output="Traceback\nValueError: x"), "exit code 1: ValueError: x"),
        (Attempt(-9, 9.0), "signal 9"),
        (Attempt(3, 9.0, output="a\n  MemoryError: x\nb"), "exit code 3: MemoryError: x"),
        (Attempt(-9, 9.0, oom_kills=2), "signal 9, and the kernel killed 2 process(es) for memory meanwhile"),
        (Attempt(-15, 70.0, output="x", overran_s=60.0), "still running after time_limit_s=60; killed"),
    ],
)
def test_reasons(attempt, expected):
    """One line. Would not catch one that says less than the output."""
    assert attempt.reason == expected


def test_outcomes_are_documented():
    """Would not catch one that is explained wrongly."""
    page = (REPOSITORY / "docs/plan/ablations.md").read_text()
    assert all(f"| {outcome} |" in page for outcome in TrialOutcome)
