"""Checkpoints and schedules of commits 5f56659 and 96c20d78 still resume and replay, with the numbers that they had."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_line import REPOSITORY
from safetensors.torch import load_file

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]

KEPT = Path("tests/fixtures/kept_runs")
MEASURED = ("timing_s/", "perf/", "reshard/", "memory/", "trainer/", "rollout/pause_s")
"""Metrics that measure the machine."""
ROUNDING = {"rel": 1e-3, "abs": 1e-5}
"""Another processor adds in another order; a step with other samples differs by far more."""


def numbers(metrics: Path, after: int = 0) -> dict[int, dict[str, float]]:
    """Step -> its metrics without those that measure the machine, for steps later than `after`."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        line["step"]: {name: value for name, value in line.items() if not name.startswith(MEASURED)}
        for line in lines
        if line["step"] > after
    }


def assert_goes_on_as_recorded(run: Path, kept: Path, after: int) -> None:
    """Every metric that was recorded is there under its name, and it and the exported weights have the same values."""
    recorded, ours = numbers(kept / "metrics.jsonl", after), numbers(run / "metrics.jsonl")
    assert ours.keys() == recorded.keys() and recorded
    for step, metrics in recorded.items():
        assert {name: ours[step].get(name) for name in metrics} == pytest.approx(metrics, **ROUNDING), step
    theirs, weights = load_file(kept / "after.safetensors"), load_file(run / "hf_model" / "model.safetensors")
    torch.testing.assert_close(weights, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "recipe",
    [
        *("ppo", "agent"),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("lora", "sft", "dpo", "reward")),
    ],
)
def test_a_kept_checkpoint_goes_on(command_line, tmp_path: Path, recipe: str) -> None:
    """After step 2, to the numbers of the run that wrote it. Would not catch a change that only other layouts meet."""
    kept = REPOSITORY / KEPT / recipe
    folder = tmp_path / "kept"
    shutil.copytree(kept / "global_step_2", folder / "run/global_step_2")
    stage = recipe if recipe in ("sft", "dpo", "reward") else "train"
    run = command_line("--local", folder=folder, config=str(KEPT / f"{recipe}.yaml"), stage=stage)
    assert run.wait() == 0, run.text()
    assert "resuming after step 2" in run.text()
    assert_goes_on_as_recorded(run.run, kept, after=2)


@pytest.mark.parametrize("recipe", ["grpo_ahead", pytest.param("ahead", marks=pytest.mark.exhaustive)])
def test_a_kept_schedule_is_repeated(command_line, recipe: str) -> None:
    """Slices, versions and responses as recorded. Would not catch a lost replica: none was lost."""
    kept = REPOSITORY / KEPT / recipe
    once = "trainer.test_freq=5040"  # their runs validated after the last step
    run = command_line("--local", "--collapse", once, f"--replay={kept}", config=str(KEPT / f"{recipe}.yaml"))
    assert run.wait() == 0, run.text()
    assert_goes_on_as_recorded(run.run, kept, after=0)
