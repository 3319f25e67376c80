"""What of vLLM's CUDA worker the code relies on: streams, second model runner, KV cache. For memory see
test_mapped_memory.py."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm

from megatron_rl.device import keep_current_stream
from megatron_rl.rollout.kv_cache import KVCache

pytestmark = pytest.mark.timeout(120)

ROOT = Path(vllm.__file__).parent


def assigned_to_self(path: str, kind: str) -> set[str]:
    """Attributes that the methods of a class assign, read from the source."""
    tree = ast.parse((ROOT / path).read_text())
    (node,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kind]
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


@pytest.mark.parametrize(
    ("path", "kind", "attributes"),
    [
        ("v1/worker/gpu/model_runner.py", "GPUModelRunner", {"model", "kv_caches"}),
        ("v1/worker/gpu_model_runner.py", "GPUModelRunner", {"model", "kv_caches"}),
        ("v1/worker/gpu_worker.py", "Worker", {"model_runner"}),
        ("v1/worker/worker_base.py", "WorkerWrapperBase", {"worker"}),
        ("v1/executor/uniproc_executor.py", "UniProcExecutor", {"driver_worker"}),
        ("v1/engine/llm_engine.py", "LLMEngine", {"model_executor", "vllm_config"}),
    ],
)
def test_the_way_to_the_model_and_the_cache(path: str, kind: str, attributes: set[str]) -> None:
    """Each step of it, for both runners. Would not catch an attribute that is set and means another thing."""
    assert attributes <= assigned_to_self(path, kind)


def test_the_second_runner_does_what_we_ask(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken where the variable says so, and lacks nothing of this configuration. It is not built here."""
    assert vllm_config._get_v2_model_runner_unsupported_features() == []
    for value in (True, False):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(value)))
        assert vllm_config.use_v2_model_runner is value


def test_vllm_keeps_the_stream_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """With our call it stays, without vLLM moves the thread to a stream of its own; on a pretended CUDA.

    Would not catch a library that sets streams from C++.
    """
    from vllm.utils import torch_utils

    trainers, streams = object(), []

    class OwnStream:
        def wait_stream(self, stream: object) -> None:
            streams.append("waited")

    pretended = SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: True, is_cpu=lambda: False)
    monkeypatch.setattr("vllm.platforms.current_platform", pretended)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: trainers)
    monkeypatch.setattr(torch.cuda, "Stream", OwnStream)
    monkeypatch.setattr(torch_utils, "prev_set_stream", lambda stream: None)
    monkeypatch.setattr(torch_utils, "_current_stream_tls", SimpleNamespace(value=None))
    keep_current_stream(torch.device("cpu"))
    assert isinstance(torch_utils.current_stream(), OwnStream) and streams == ["waited"]
    torch_utils._current_stream_tls.value = None
    keep_current_stream(torch.device("cuda", 0))
    assert torch_utils.current_stream() is trainers and streams == ["waited"]


def test_the_second_runners_cache_comes_and_goes() -> None:
    """Allocated by its own function on the CPU: one storage, freed and zeroed under the same views.

    Would not catch a layout that only a CUDA kernel asks for.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    page, blocks, names = spec.page_size_bytes, 4, ["first", "second"]
    assert page == 2 * 16 * 2 * 8 * 2  # keys and values
    size = len(names) * blocks * page
    place = KVCacheTensor(size, names, layer_stride=blocks * page, block_stride=page)
    config = KVCacheConfig(blocks, [place], [KVCacheGroupSpec(names, spec)])
    layers = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBNHC)
    cache = KVCache(list(layers.values()))
    assert list(layers) == names and cache.num_bytes == size
    for layer in layers.values():
        layer.fill_(3)
    addresses = [layer.data_ptr() for layer in layers.values()]
    cache.release()
    assert cache.num_bytes == 0
    cache.allocate()
    assert [layer.data_ptr() for layer in layers.values()] == addresses
    assert cache.num_bytes == size and not any(layer.any() for layer in layers.values())
    layers["first"].fill_(1)
    assert not layers["second"].any()
