"""Checkpoints of one megatron-core are resumed with the other, both ways, to their writer's weights, bit for bit."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

OTHER = next(Path(sys.prefix, "stacks").glob("*/.complete"), None)
"""Of the other megatron-core: `make test-stacks` unpacks it."""
TRAIN = (sys.executable, "-m", "megatron_rl", "train", "--config", "configs/demo_cpu.yaml")
SMALL = (
    *("--local", "--collapse", "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
    *("trainer.total_training_steps=3", "trainer.save_freq=2", "trainer.val_before_train=false"),
)


@pytest.mark.skipif(OTHER is None, reason="make test-stacks unpacks the other megatron-core")
@pytest.mark.parametrize("writes_with_the_other", [False, True])
def test_checkpoints_go_from_one_megatron_to_the_other(command_line, tmp_path: Path, writes_with_the_other) -> None:
    """Would not catch a difference that experts alone have, or other layouts."""
    assert OTHER is not None
    stacks = [{"PYTHONPATH": ""}, {"PYTHONPATH": str(OTHER.parent)}]
    first, second = stacks[::-1] if writes_with_the_other else stacks
    written = command_line(*SMALL, folder=tmp_path / "written", command=TRAIN, variables=first)
    assert written.wait() == 0, written.text()
    shutil.copytree(written.run / "global_step_2", tmp_path / "read/run/global_step_2")
    read = command_line(*SMALL, folder=tmp_path / "read", command=TRAIN, variables=second)
    assert read.wait() == 0, read.text()
    assert "resuming after step 2" in read.text()
    ours, theirs = (load_file(run.run / "hf_model/model.safetensors") for run in (read, written))
    assert all(ours[name].equal(theirs[name]) for name in theirs.keys() | ours.keys())
    newest, oldest = (written, read) if writes_with_the_other else (read, written)
    assert "deprecated" not in newest.text().lower() + oldest.text().lower()
