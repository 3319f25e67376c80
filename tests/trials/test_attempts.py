"""Real processes as attempts of a trial: limits, the signal in the middle, lack of memory; a folder's owner."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from megatron_rl.errors import ConfigError, Violation
from megatron_rl.trials.ablation import CSV, LOCK, MARKDOWN, Ablation, only_ablation
from megatron_rl.trials.ablation_file import AblationConfig
from megatron_rl.trials.points import PlannedPoint, Point
from megatron_rl.trials.trial import TimeLimits, Trial, run_attempt
from megatron_rl.trials.trial_outcome import TrialOutcome

pytestmark = pytest.mark.timeout(60)

STEPS = """
import json, pathlib, signal, sys, time
def stop(*_):
    print("stopped", flush=True)
    sys.exit(20)
signal.signal(signal.SIGTERM, stop)
metrics = pathlib.Path({metrics!r})
metrics.parent.mkdir(exist_ok=True)
for step in range(1, {steps} + 1):
    with metrics.open("a") as file:
        print(json.dumps({{"step": step}}), file=file)
    time.sleep(0.3)
print("well", flush=True)
time.sleep({then})
"""


def stepping(folder: Path, steps: int, then: float = 0) -> list[str]:
    """A command that records so many steps, 0.3 s each, and then sleeps; code 20 when it is asked to stop."""
    script = STEPS.format(metrics=str(folder / "run/metrics.jsonl"), steps=steps, then=then)
    return [sys.executable, "-c", script]


@pytest.mark.parametrize(
    ("source", "limit", "expected"),
    [
        ("import time; time.sleep(600)", 0.3, TrialOutcome.TIMED_OUT),
        ("import torch; torch.empty(2**60, dtype=torch.uint8)", 50.0, TrialOutcome.OUT_OF_MEMORY),
        ("x = bytearray(2**60)", 50.0, TrialOutcome.OUT_OF_MEMORY),
        ("1 / 0", 50.0, TrialOutcome.CRASHED),
        ("print('MemoryError')", 50.0, TrialOutcome.FINISHED),
    ],
)
def test_real_ends(tmp_path, source, limit, expected):
    """Would not catch a message of CUDA, Ray or the kernel, which take other machines."""
    attempt = run_attempt([sys.executable, "-c", source], tmp_path, TimeLimits(whole_s=limit))
    assert attempt.outcome is expected, attempt
    assert attempt.overran_s == (limit if expected is TrialOutcome.TIMED_OUT else None)


def test_an_attempt_is_stopped_after_its_step_and_the_next_one_goes_on(tmp_path):
    """SIGTERM after step 2, whose attempt ends with code 20; the second says only what it printed itself.

    Would not catch a run that takes up the wrong step, which the nightly's own comparison does.
    """
    first = run_attempt(stepping(tmp_path, 600), tmp_path, TimeLimits(step_s=30.0), stop_after=2)
    assert first.outcome is TrialOutcome.INTERRUPTED and first.to_stop and first.output == "stopped\n"
    assert 2 <= first.last_step < 600
    (tmp_path / "run/metrics.jsonl").unlink()
    second = run_attempt(stepping(tmp_path, 3), tmp_path, TimeLimits(step_s=30.0))
    assert second.outcome is TrialOutcome.FINISHED and second.output == "well\n" and second.last_step == 3


@pytest.mark.parametrize(
    ("steps", "limits"),
    [(0, TimeLimits(first_step_s=1.5, step_s=50.0)), (2, TimeLimits(first_step_s=50.0, step_s=3.0))],
    ids=["before the first step", "after the second"],
)
def test_an_attempt_that_stands_still_is_killed(tmp_path, steps, limits):
    """By the limit of where it stands, and by SIGKILL, as SIGTERM would give code 20. Would not catch a slow step."""
    attempt = run_attempt(stepping(tmp_path, steps, then=600), tmp_path, limits)
    limit = limits.step_s if steps else limits.first_step_s
    assert attempt.outcome is TrialOutcome.TIMED_OUT and attempt.overran_s == limit and attempt.exit_code == -9
    assert attempt.last_step == steps


def test_a_folder_is_one_ablations(tmp_path):
    """Not another's at the same time, and not what something else has written. Would not catch another machine's."""
    folder = tmp_path / "deep/mine"
    with only_ablation(folder), pytest.raises(ConfigError, match="another ablation is at work"), only_ablation(folder):
        pass
    with only_ablation(folder):
        pass
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").touch()
    says = "holds files of something else; try: .*other/ablation"
    with pytest.raises(ConfigError, match=says), only_ablation(tmp_path / "other"):
        pass
    (folder / LOCK).unlink()
    (folder / LOCK).symlink_to(tmp_path / "other/thesis.tex")
    (tmp_path / "other/thesis.tex").write_text("years of work")
    with pytest.raises(OSError, match="symbolic links"), only_ablation(folder):
        pass
    assert (tmp_path / "other/thesis.tex").read_text() == "years of work"


def test_a_report_replaces_links_and_pipes(tmp_path):
    """Nothing is written to what a link leads to, and nobody waits for a reader. Would not catch a folder `points`
    that is a link.
    """
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / MARKDOWN).symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / CSV)
    point = PlannedPoint(Point("a", "key", {}, {}), "", [Violation({"x": 1}, "must be less")])
    Ablation(AblationConfig("base.yaml"), tmp_path, [point], print).write_report()
    assert (tmp_path / "precious").read_text() == "years of work"
    begins = {MARKDOWN: "# Ablation", CSV: "name"}
    assert all((tmp_path / name).read_text().startswith(begin) for name, begin in begins.items())
    (tmp_path / "b").symlink_to(tmp_path)
    Trial(tmp_path, tmp_path / "b").empty()
    assert list((tmp_path / "b").iterdir()) == [] and (tmp_path / "precious").exists()
