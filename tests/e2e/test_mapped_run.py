"""The fastest placement that `map` finds for the demo, started by the one command that it prints."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_line import REPOSITORY
from short_runs import WITHOUT_RAY

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(480)]

MAP = (sys.executable, "-m", "megatron_rl", "map", "--config", "configs/demo_cpu.yaml", "--hardware", "cpu")


def test_the_printed_command_starts_the_winner(tmp_path, command_line, few_prompts):
    """On four processes: the run ends well, and its ranks are those of the placement. Would not catch a placement that
    is slow.
    """
    kept = [
        "trainer.total_training_steps=1",
        "trainer.test_freq=5040",
        f"data.val_files={few_prompts / 'test.parquet'}",
    ]
    kept += ["trainer.val_before_train=false", "trainer.export_hf=false", f"trainer.default_local_dir={tmp_path}/0/run"]
    options = ["--gpus", "4", "--out", str(tmp_path / "best.yaml"), "--keep", WITHOUT_RAY, *kept]
    finished = subprocess.run(
        [*MAP, *options], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False, env=os.environ
    )
    assert finished.returncode == 0, finished.stderr
    program, *arguments = shlex.split(finished.stdout.splitlines()[-1])
    assert Path(program).name == "megatron-rl" and arguments == ["train", "--config", str(tmp_path / "best.yaml")]
    run = command_line(command=(sys.executable, "-m", "megatron_rl", *arguments), names_folder=False)
    assert run.wait() == 0, run.text()
    assert json.loads((run.run / "summary.json").read_text())["steps"] == 1
    placed = yaml.safe_load((tmp_path / "best.yaml").read_text())
    slots = {one["lane"] for one in json.loads((run.run / "timeline.json").read_text())}
    assert {"global_pool", *placed.get("pools", {})} <= slots
    assert run.family() == []
