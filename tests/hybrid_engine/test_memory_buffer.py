"""Memory that comes and goes under views that stay."""

import psutil
import torch

from megatron_rl.hybrid_engine.stable_memory import MemoryBuffer

CPU = torch.device("cpu")
MIB = 1 << 20


def resident_bytes():
    return psutil.Process().memory_info().rss


def test_views_see_the_new_memory():
    """The same view objects read and write what came back. Would not catch a leak of the old memory."""
    buffer = MemoryBuffer(10, torch.float32, CPU)
    head, tail = buffer.view(0, (2, 2)), buffer.view(4, (6,))
    storage, places = head.untyped_storage(), (head.data_ptr(), tail.data_ptr())
    for value in (1.0, 2.0):
        buffer.release()
        buffer.allocate()
        buffer.data.copy_(torch.arange(10.0) * value)
        assert torch.equal(head, torch.tensor([[0.0, 1.0], [2.0, 3.0]]) * value)
        tail.zero_()
        assert torch.equal(buffer.data, torch.tensor([0, 1, 2, 3, 0, 0, 0, 0, 0, 0.0]) * value)
    # PyTorch compares storages by their address, so this is the same storage and not a copy of it.
    assert storage._cdata == buffer.data.untyped_storage()._cdata == tail.untyped_storage()._cdata
    assert places == (head.data_ptr(), tail.data_ptr())


def test_is_allocated_and_bytes_follow():
    """Both calls may be repeated; allocate keeps content. Would not catch memory that an allocator holds back."""
    buffer = MemoryBuffer(6, torch.bfloat16, CPU)
    buffer.data.fill_(3)
    for _ in range(2):
        buffer.allocate()
        assert buffer.is_allocated and buffer.num_bytes == 12
        assert buffer.data.tolist() == [3.0] * 6
    for _ in range(2):
        buffer.release()
        assert not buffer.is_allocated and buffer.num_bytes == 12


def test_an_empty_buffer_is_always_there():
    """A single pipeline stage has no foreign parameters. Would not catch a wrong size of anything else."""
    buffer = MemoryBuffer(0, torch.float32, CPU)
    buffer.release()
    buffer.allocate()
    assert buffer.is_allocated and buffer.num_bytes == 0


def test_memory_really_goes_back_to_the_system():
    """256 MiB leave the resident set, twice. Would not catch that on CUDA, whose allocator caches."""
    before = resident_bytes()
    buffer = MemoryBuffer(256 * MIB, torch.uint8, CPU)
    view = buffer.view(0, (16, 16 * MIB))
    for value in (1, 2):
        buffer.allocate()
        view.fill_(value)
        assert resident_bytes() - before > 240 * MIB
        buffer.release()
        assert resident_bytes() - before < 32 * MIB
