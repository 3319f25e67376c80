"""The environment of a worker on CUDA, as vLLM reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_rl.roles.environment import worker_environment

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A CUDA worker's variables, set here."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    variables = worker_environment("cuda", ranks_per_node=8)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


def test_what_cuda_has_and_the_cpu_has_not(on_cuda: dict[str, str]) -> None:
    """By hand. Would not catch a variable that another one takes the place of."""
    on_cpu = worker_environment("cpu", ranks_per_node=8)
    assert {name: value for name, value in on_cuda.items() if name not in on_cpu} == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    }
    assert set(on_cpu) - set(on_cuda) == {"VLLM_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE"}


@pytest.mark.exhaustive
def test_vllm_knows_and_reads_every_variable(on_cuda: dict[str, str]) -> None:
    """A misspelt name would be ignored in silence. Would not catch a variable whose meaning has changed."""
    from vllm import envs

    for name in on_cuda:
        assert not name.startswith("VLLM_") or name in envs.environment_variables
    assert envs.VLLM_USE_V2_MODEL_RUNNER is True
    assert envs.VLLM_ALLREDUCE_USE_SYMM_MEM is False and envs.VLLM_ALLREDUCE_USE_FLASHINFER is False
    assert envs.VLLM_ENABLE_V1_MULTIPROCESSING is False


def test_the_users_allocator_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would not catch a setting with which freed memory is not given back."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    assert worker_environment("cuda", ranks_per_node=1)["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128"


def test_memory_that_processes_share_is_not_of_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's handles between processes need it so. Would not catch a newer CUDA that shares both."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    alone, shared = (worker_environment("cuda", ranks_per_node=8, sees_node=sees) for sees in (False, True))
    name = "PYTORCH_CUDA_ALLOC_CONF"
    assert (alone.pop(name), shared.pop(name)) == ("expandable_segments:True", "expandable_segments:False")
    assert alone == shared


@pytest.mark.exhaustive
def test_expandable_segments_go_together_with_vllm(
    on_cuda: dict[str, str], vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its configuration has nothing against them, and its own pools turn them off and on again, and only them.

    The pool's memory is not taken: that needs the driver. Would not catch a driver without virtual memory.
    """
    from contextlib import contextmanager

    from vllm.device_allocator import cumem

    vllm_config._verify_kv_transfer_compat()
    written: list[str] = []
    given = "expandable_segments:True,max_split_size_mb:512"
    monkeypatch.setattr(cumem, "current_alloc_conf", lambda: given)
    monkeypatch.setattr(cumem, "set_alloc_conf", written.append)

    @contextmanager
    def pool(malloc: Any, free: Any) -> Iterator[tuple[Any, None]]:
        class Empty:
            def snapshot(self) -> list[Any]:
                return []

        yield Empty(), None

    monkeypatch.setattr(cumem, "use_memory_pool_with_allocator", pool)
    with cumem.CuMemAllocator().use_memory_pool("kv_cache"):
        assert written == ["expandable_segments:False,max_split_size_mb:512"]
    assert written[1:] == [given]
