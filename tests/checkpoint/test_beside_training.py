"""A save beside training writes what was there when it began, however late the files are written."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def changed_before_it_is_written(folder) -> dict[str, torch.Tensor]:
    """What is read back of a whole tensor and of half a tensor that training changed before a file was there."""
    import torch.distributed as dist
    from megatron.core.dist_checkpointing import ShardedTensor

    from megatron_rl.checkpoint import sharded_files
    from third_party_patches import apply_patches

    apply_patches("cpu")
    dist.init_process_group("gloo")
    goes_on = threading.Event()

    class Late(threading.Thread):
        def run(self) -> None:
            assert goes_on.wait(60)
            super().run()

    sharded_files.threading = SimpleNamespace(Thread=Late)
    tensors = {"whole": torch.arange(12.0), "half": torch.arange(24.0)[12:]}

    def state(data: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
        return {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in data.items()}

    writer = sharded_files.CheckpointWriter(torch.device("cpu"))
    folder.mkdir()
    writer.save(state(tensors), folder, beside_training=True)
    for tensor in tensors.values():
        tensor.fill_(-1.0)
    goes_on.set()
    assert writer.finish(wait=True)
    read = {name: torch.zeros(12) for name in tensors}
    sharded_files.read(state(read), folder)
    return read


def test_what_training_changes_is_saved_as_it_was(tmp_path) -> None:
    """On a CPU, where nothing is copied to another memory. Would not catch a copy that CUDA makes too late."""
    [read] = run_ranks(1, changed_before_it_is_written, tmp_path / "saved")
    assert torch.equal(read["whole"], torch.arange(12.0))
    assert torch.equal(read["half"], torch.arange(12.0, 24.0))
