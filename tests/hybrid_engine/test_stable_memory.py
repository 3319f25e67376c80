"""Memory that leaves and comes back at its addresses: the CPU's form, by the rules that CUDA's has to keep as well."""

import mmap

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.hybrid_engine.stable_memory import HostPages, Memory, Resized, adopt, take, whole_pages

CPU = torch.device("cpu")
MIB = 1 << 20
PAGE = mmap.PAGESIZE


def resident_bytes():
    return psutil.Process().memory_info().rss


def keeps_addresses_and_content(data: torch.Tensor, memory: Memory) -> None:
    """Twenty rounds: the same addresses, and exactly what was written after each take. Views are made before."""
    views = [data[:7], data[11:], data[3:9].view(2, 3)]
    first = [view.data_ptr() for view in (data, *views)]
    for number in range(20):
        memory.release()
        assert not memory.is_allocated
        memory.allocate()
        assert memory.is_allocated
        written = torch.randint(-1000, 1000, (len(data),), generator=torch.Generator().manual_seed(number))
        data.copy_(written.to(data.dtype))
        assert [view.data_ptr() for view in (data, *views)] == first
        assert data.long().equal(written) and views[2].long().equal(written[3:9].view(2, 3))
        memory.allocate()  # what is there stays
        assert data.long().equal(written)
        memory.clear()
        assert not data.any() and memory.is_allocated


@pytest.mark.parametrize("numel", [12, 1000, PAGE, 3 * PAGE + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_addresses_stay_and_content_is_what_was_written(numel, dtype):
    """Sizes within a page and beyond. Would not catch an address that only moves when memory is short."""
    data, memory = take(numel, dtype, CPU, "anything")
    assert memory.num_bytes == numel * dtype.itemsize and data.data_ptr() % PAGE == 0
    keeps_addresses_and_content(data, memory)


def test_memory_of_others_keeps_its_addresses_too():
    """A tensor of torch's own allocator, as vLLM makes its cache. Would not catch another allocator than glibc's."""
    whole = torch.ones(5 * PAGE)
    memory = adopt([whole[:PAGE], whole[PAGE:]], "kv_cache")
    assert memory.num_bytes == 5 * PAGE * 4
    keeps_addresses_and_content(whole, memory)


def test_memory_really_goes_back_to_the_system():
    """256 MiB leave the resident set, of either kind. Would not catch memory that CUDA's driver keeps."""
    own, memory = take(256 * MIB, torch.uint8, CPU, None)
    others = torch.ones(256 * MIB, dtype=torch.uint8)
    own.fill_(1)
    for data, its in ((own, memory), (others, adopt([others], "kv_cache"))):
        held = resident_bytes()
        its.release()
        assert held - resident_bytes() > 240 * MIB
        its.allocate()
        assert held - resident_bytes() > 240 * MIB  # none comes before it is touched
        data[: 64 * MIB].fill_(1)
        assert 180 * MIB < held - resident_bytes() < 200 * MIB
        its.clear()
        assert held - resident_bytes() > 240 * MIB and not data.any()
        its.release()


def test_views_after_release_read_zeros():
    """What the text of the module promises on a CPU. Would not catch a fault on CUDA, where it is one."""
    data, memory = take(3 * PAGE, torch.uint8, CPU, None)
    data.fill_(5)
    memory.release()
    assert not data.any()
    data.fill_(6)
    assert not memory.is_allocated and data.all()  # a write is not noticed


def test_memory_goes_when_nobody_names_its_tensor():
    """The mapping lives as long as a view, and no longer. Would not catch a tensor that a library keeps."""
    before = resident_bytes()
    data, memory = take(128 * MIB, torch.uint8, CPU, None)
    data.fill_(1)
    view = data[5:9]
    del data, memory
    assert view.tolist() == [1] * 4 and resident_bytes() - before > 120 * MIB
    del view
    assert resident_bytes() - before < 8 * MIB


def test_nothing_at_all_is_always_there():
    """A single stage has no foreign parameters. Would not catch a wrong size of anything else."""
    for data, memory in (take(0, torch.float32, CPU, "anything"), (None, adopt([], "kv_cache"))):
        memory.release()
        assert memory.is_allocated and memory.num_bytes == 0
        memory.clear()
        assert data is None or data.tolist() == []


def test_what_nobody_notes_the_address_of():
    """The form for CUDA's scratch memory: bytes and views. Would not catch memory that CUDA's allocator keeps."""
    data = torch.ones(10)
    memory = Resized(data.untyped_storage())
    memory.release()
    assert not memory.is_allocated and memory.num_bytes == 40 and data.untyped_storage().nbytes() == 0
    memory.allocate()
    memory.clear()
    assert memory.is_allocated and data.tolist() == [0.0] * 10


@given(st.integers(0, 5 * PAGE), st.integers(0, 5 * PAGE))
def test_whole_pages_by_their_definition(address, num_bytes):
    """Every page that lies within, and no other. Would not catch pages of another size."""
    start, stop = whole_pages(address, num_bytes)
    pages = [n for n in range(12) if address <= n * PAGE and (n + 1) * PAGE <= address + num_bytes]
    assert 0 <= start <= stop <= num_bytes
    if pages:
        assert (address + start, address + stop) == (pages[0] * PAGE, (pages[-1] + 1) * PAGE)
    else:
        assert start == stop


def test_neighbours_of_adopted_memory_stay():
    """Pages that are shared are no one's to drop. Would not catch memory that is mapped twice."""
    memory = torch.ones(4 * PAGE)
    own = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=2 * PAGE + 9, offset=4 * 100)
    pages = HostPages([own.untyped_storage()])
    pages.release()
    assert memory[:100].all() and memory[100 + 2 * PAGE + 9 :].all()
    assert int((memory == 0).sum()) in (2 * PAGE - PAGE // 4, 2 * PAGE)  # all whole pages, wherever they begin
