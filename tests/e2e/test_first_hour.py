"""A stranger's first commands: init, plan, train, view, explain; and doctor."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import REPOSITORY

pytestmark = pytest.mark.slow


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command of ours, typed in another folder than the project's."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl", *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_from_nothing_to_a_page(command_line, tmp_path: Path) -> None:
    """`init` without a model, then each command that it and the run print: the plan accepts it, 20 steps of GRPO teach
    a model that knew nothing to answer in digits, page and sample are there, and the model is evaluated. Would not
    catch what a real model needs.
    """
    printed = command("init", "mine", "--model", "tiny", "--kind", "score", "--gpus", "0", folder=tmp_path).stdout
    commands = [line.split()[1] for line in printed.splitlines() if line.startswith("  ")]
    assert commands == ["doctor", "plan", "train", "view"] and " s a step, " in printed
    command("plan", "--config", "mine/run.yaml", folder=tmp_path)
    config = str(tmp_path / "mine/run.yaml")
    run = command_line("--local", config=config, names_folder=False)
    assert run.wait() == 0, run.text()
    lines = [json.loads(line) for line in (tmp_path / "mine/output/metrics.jsonl").read_text().splitlines()]
    rewards = [line["critic/score/mean"] for line in lines if "critic/score/mean" in line]
    assert rewards[0] < 0.15 and rewards[-1] > 0.9, rewards
    _, _, following = run.text().partition("\nNext:\n")
    view, evaluation = (shlex.split(line, comments=True) for line in following.splitlines())
    view, evaluation = view[view.index("view") :], evaluation[evaluation.index("eval") :]
    assert f"written to {tmp_path}/mine/output/view.html" in command(*view, folder=tmp_path).stdout
    assert "acc" in command(*evaluation, folder=tmp_path).stdout
    assert (tmp_path / "mine/output/view.html").stat().st_size > 100_000
    assert "advantage" in command("explain", "mine/output", "--step", "3", "--sample", "1", folder=tmp_path).stdout


def test_doctor_has_a_line_for_each_thing(tmp_path: Path) -> None:
    """As typed. Would not catch a wrong value: tests/node_check/test_doctor.py."""
    printed = command("doctor", folder=tmp_path).stdout
    assert all(word in printed for word in ("torch", "GPUs", "/dev/shm", "TMPDIR", "RAY_ADDRESS")), printed
