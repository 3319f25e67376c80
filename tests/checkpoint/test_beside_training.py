"""A save writes what was there when it began, however late, and asks as much of its folder however many save."""

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


def asked_of_the_folder(folder) -> dict[str, int]:
    """What a rank asks of the folder that it saves to, as counts."""
    import torch.distributed as dist
    from scale_saver import SavingHost

    from third_party_patches import apply_patches

    apply_patches("cpu")
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    return SavingHost().save(folder)


def test_a_rank_asks_the_same_of_a_folder_however_many_write_to_it(tmp_path) -> None:
    """And lists it on rank 0 alone, where a list has the names of all ranks. Would not catch calls that Python does not
    audit, such as `stat`.
    """
    few, many = (run_ranks(size, asked_of_the_folder, tmp_path / str(size)) for size in (2, 6))
    assert few == many[:2] and all(rank == few[1] for rank in many[1:])
    assert few[0]["listed"] == 1 and "listed" not in few[1] and few[1]["files"] == 1
