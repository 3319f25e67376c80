"""The pickles of a checkpoint as Megatron writes them are let through; a malicious object in one is not loaded."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path

import numpy
import pytest
import torch
from ranks import run_ranks

from megatron_rl.checkpoint.pickles import forbidden_globals, pickles_in

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

VALUES = {"step": 3, "lr": 0.5, "groups": [{"betas": (0.9, 0.999), "name": None, "tied": {1}}], "t": torch.ones(2)}


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def save_and_load(folder: Path) -> tuple[bool, str]:
    """One checkpoint of tensors and random states, one with a malicious object; whether the first came back, and why
    the second did not."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from torch.distributed.checkpoint.api import CheckpointException

    from third_party_patches import apply_patches

    apply_patches("cpu")
    dist.init_process_group("gloo")

    def state(value: object) -> dict:
        tensors = {name: torch.ones(4, 3, dtype=getattr(torch, name)) for name in ("float32", "bfloat16", "int64")}
        sharded = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}
        return {**sharded, "random": ShardedObject("random", value, (1,), (0,)), "common": VALUES}

    randomness = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    for name, value in (("good", randomness), ("evil", Malicious(folder / "mark"))):
        (folder / name / "actor").mkdir(parents=True)
        dist_checkpointing.save(state(value), folder / name / "actor")
    (folder / "mark").unlink(missing_ok=True)
    loaded = dist_checkpointing.load(state(None), folder / "good" / "actor")
    same = torch.equal(loaded["random"]["torch"], randomness["torch"]) and torch.equal(
        loaded["float32"], torch.ones(4, 3)
    )
    try:
        dist_checkpointing.load(state(None), folder / "evil" / "actor")
    except CheckpointException as error:
        return same, str(error)
    return same, "nothing"


def test_real_checkpoints_and_one_with_a_command_inside(tmp_path) -> None:
    """`.metadata`, and `common.pt` before 0.19, are harmless; torch refuses an object within a `.distcp` file.

    Would not catch what another version of Megatron or torch writes, nor another optimizer's state.
    """
    ((came_back, refusal),) = run_ranks(1, save_and_load, tmp_path)
    files = pickles_in(tmp_path / "good")
    assert [file.name for file in files] in ([".metadata", "common.pt"], [".metadata"])
    assert not any(forbidden_globals(file) for file in files)
    assert came_back
    assert "Weights only load failed" in refusal
    assert not (tmp_path / "mark").exists()

    metadata = pickle.loads(files[0].read_bytes())
    metadata.planner_data = Malicious(tmp_path / "mark")
    files[0].write_bytes(pickle.dumps(metadata))
    assert forbidden_globals(files[0]) == {"posix.system"}
    assert not (tmp_path / "mark").exists()
