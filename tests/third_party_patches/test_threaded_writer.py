"""Checkpoints are written without starting processes, and a file that cannot be written is an error."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def sharded(data: torch.Tensor) -> dict:
    from megatron.core.dist_checkpointing import ShardedTensor

    return {"x": ShardedTensor.from_rank_offsets("x", data)}


def check_threaded_writer(folder: Path) -> None:
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    from megatron_rl.checkpoint.sharded_files import OWN_WRITER
    from third_party_patches.megatron_core import cpu_torch, threaded_writer

    dist.init_process_group("gloo")
    cpu_torch.PATCH.apply()
    expected = torch.randn(5, 3)
    (folder / "forked").mkdir()
    # These ranks are daemons, as those of many launchers are: they may not have children.
    with pytest.raises(AssertionError, match="daemonic processes"):
        dist_checkpointing.save(sharded(expected), str(folder / "forked"))

    threaded_writer.PATCH.apply()
    (folder / "threaded").mkdir()
    dist_checkpointing.save(sharded(expected), str(folder / "threaded"))
    assert psutil.Process().children() == []
    loaded = dist_checkpointing.load(sharded(torch.zeros(5, 3)), str(folder / "threaded"))
    assert torch.equal(loaded["x"], expected)

    (folder / "refused").mkdir()
    request = dist_checkpointing.save(sharded(expected), str(folder / "refused"), async_sharded_save=True, **OWN_WRITER)
    (folder / "refused" / "__0_0.distcp").mkdir()
    with pytest.raises(CheckpointException, match="__0_0.distcp"):
        request.execute_sync()


def test_threaded_writer(tmp_path: Path) -> None:
    """Would not catch a slower write, or a thread that a killed rank leaves: there is none without its process."""
    run_ranks(1, check_threaded_writer, tmp_path, timeout=60)
