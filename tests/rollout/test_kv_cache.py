"""The KV cache's memory, on plain tensors."""

import torch

from megatron_rl.rollout.kv_cache import KVCache


def test_memory_goes_and_comes_back_zeroed_under_the_same_tensors():
    """Bytes, identity, content, over two rounds. Would not catch an engine that keeps a copy."""
    layers = [torch.full((2, 8), 1.0), torch.full((4,), 2.0, dtype=torch.bfloat16)]
    views = [layers[0][1], layers[1][:2]]
    cache = KVCache(layers)
    assert cache.num_bytes == 2 * 8 * 4 + 4 * 2
    for _ in range(2):
        cache.release()
        cache.release()
        assert cache.num_bytes == 0 and [layer.untyped_storage().nbytes() for layer in layers] == [0, 0]
        cache.allocate()
        assert cache.num_bytes == 72
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
    assert cache.num_bytes == 0 and whole.untyped_storage().nbytes() == 0
    cache.allocate()
    assert cache.num_bytes == 40 and whole.tolist() == [0.0] * 10


def test_allocate_clears_a_cache_that_is_there():
    """No block of an earlier round is left. Would not catch a prefix table that still names it."""
    layer = torch.ones(3)
    cache = KVCache([layer])
    address = layer.data_ptr()
    cache.allocate()
    assert layer.tolist() == [0.0] * 3 and layer.data_ptr() == address
