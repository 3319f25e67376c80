"""The KV cache's memory, on plain tensors."""

import psutil
import pytest
import torch

from megatron_rl.rollout.kv_cache import KVCache


def test_memory_goes_and_comes_back_zeroed_under_the_same_tensors():
    """Bytes, identity, content, over two rounds. Would not catch an engine that keeps a copy."""
    layers = [torch.full((2, 8), 1.0), torch.full((4,), 2.0, dtype=torch.bfloat16)]
    views = [layers[0][1], layers[1][:2]]
    addresses = [tensor.data_ptr() for tensor in (*layers, *views)]
    cache = KVCache(layers)
    assert cache.num_bytes == 2 * 8 * 4 + 4 * 2
    for _ in range(2):
        cache.release()
        cache.release()
        assert cache.num_bytes == 0
        cache.allocate()
        assert cache.num_bytes == 72 and [tensor.data_ptr() for tensor in (*layers, *views)] == addresses
        assert layers[0].tolist() == [[0.0] * 8] * 2 and layers[1].tolist() == [0.0] * 4
        layers[0][1].fill_(5.0)
        layers[1].fill_(torch.nan)
        assert views[0].tolist() == [5.0] * 8 and views[1].isnan().all()


def test_a_storage_shared_by_two_layers_counts_once():
    """Two layers in one allocation, as vLLM may make them. Would not catch layers that overlap."""
    whole = torch.ones(10)
    cache = KVCache([whole[:6], whole[6:]])
    assert cache.num_bytes == 40
    cache.release()
    assert cache.num_bytes == 0
    cache.allocate()
    assert cache.num_bytes == 40 and whole.tolist() == [0.0] * 10


def test_allocate_clears_a_cache_that_is_there():
    """No block of an earlier round is left. Would not catch a prefix table that still names it."""
    layer = torch.ones(3)
    cache = KVCache([layer])
    address = layer.data_ptr()
    cache.allocate()
    assert layer.tolist() == [0.0] * 3 and layer.data_ptr() == address


def test_memory_really_goes_back_to_the_system():
    """64 MiB leave the resident set, at the same address. Would not catch that on CUDA."""
    layer = torch.ones(16 << 20)
    cache, address = KVCache([layer]), layer.data_ptr()
    for _ in range(2):
        layer.fill_(1.0)
        held = resident()
        cache.release()
        assert held - resident() > 60 << 20
        cache.allocate()
        assert held - resident() > 60 << 20 and layer.data_ptr() == address


def test_only_pages_that_are_touched_are_taken():
    """Of 64 MiB that were written before, 1 MiB is written after: so much is resident, and the rest reads as 0.

    Would not catch huge pages, of which one byte takes 2 MiB.
    """
    layer = torch.ones(16 << 20)
    cache = KVCache([layer])
    cache.allocate()
    before = resident()
    layer[: 1 << 18] = 1.0
    assert 0 < resident() - before <= 8 << 20
    assert layer[: 1 << 18].all() and not layer[1 << 18 :].any()


@pytest.mark.parametrize("first", [0, 1, 1000, 1024, 2049])
@pytest.mark.parametrize("number", [1, 1023, 1024, 5000])
def test_edges_inside_a_page_are_zeroed_and_nothing_beyond_them(first: int, number: int):
    """A storage anywhere in a page, of any size; its neighbours stay. Would not catch pages of other sizes."""
    memory = torch.ones(8192)
    own = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=number, offset=4 * first)
    assert own.untyped_storage().nbytes() == 4 * number
    KVCache([own]).allocate()
    assert memory.sum() == len(memory) - number and not memory[first : first + number].any()


def resident() -> int:
    """Bytes of this process's anonymous memory that is there."""
    return psutil.Process().memory_info().rss
