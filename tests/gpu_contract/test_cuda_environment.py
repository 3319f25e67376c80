"""The environment of a worker on CUDA, as vLLM reads it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.roles.environment import (
    ALLOCATOR_NAMES,
    choose_logging_level,
    lost_peers_survived,
    worker_environment,
)
from megatron_rl.roles.nccl_variables import ERROR_HANDLING

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
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "NCCL_GRAPH_REGISTER": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
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
    assert envs.VLLM_USE_FLASHINFER_SAMPLER is False
    assert envs.VLLM_ENABLE_V1_MULTIPROCESSING is False


def test_the_users_allocator_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would not catch a setting with which freed memory is not given back."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    assert worker_environment("cuda", ranks_per_node=1)["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128"


def test_memory_that_processes_share_is_not_of_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's handles between processes need it so. Would not catch a newer CUDA that shares both."""
    for name in ALLOCATOR_NAMES:
        monkeypatch.delenv(name, raising=False)
    alone, shared = (worker_environment("cuda", ranks_per_node=8, sees_node=sees) for sees in (False, True))
    for name in ALLOCATOR_NAMES:
        assert (alone.pop(name), shared.pop(name)) == ("expandable_segments:True", "expandable_segments:False")
    assert alone == shared


@pytest.mark.parametrize("name", ALLOCATOR_NAMES)
def test_either_name_of_the_allocator_counts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """torch reads one name before the other: a rank has both, alike. Would not catch a third name."""
    for other in ALLOCATOR_NAMES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:128")
    variables = worker_environment("cuda", ranks_per_node=1)
    assert {variables[other] for other in ALLOCATOR_NAMES} == {"max_split_size_mb:128"}


def test_contradictions_of_the_allocator_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names with two values, and segments that grow under memory that is shared. Would not catch other options."""
    monkeypatch.setenv(ALLOCATOR_NAMES[0], "expandable_segments:True")
    monkeypatch.delenv(ALLOCATOR_NAMES[1], raising=False)
    with pytest.raises(ConfigError, match=r"disable_custom_all_reduce=false.*try: expandable_segments:False"):
        worker_environment("cuda", ranks_per_node=8, sees_node=True)
    monkeypatch.setenv(ALLOCATOR_NAMES[1], "expandable_segments:False")
    with pytest.raises(ConfigError, match=r"are both set and differ; try: unset PYTORCH_CUDA_ALLOC_CONF"):
        worker_environment("cuda", ranks_per_node=8)


def test_graphs_do_not_register_with_nccl_where_segments_grow() -> None:
    """The reason is Megatron's own assertion, which this reads: without it the variable may go. Would not catch another
    reason for it.
    """
    import inspect

    from megatron.core.transformer import cuda_graphs

    source = inspect.getsource(cuda_graphs)
    assert "NCCL_GRAPH_REGISTER" in source and "expandable_segments:True" in source


def test_the_users_level_of_logging_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM falls back to is said at INFO. Would not catch a level that vLLM does not know."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert worker_environment("cuda", ranks_per_node=1)["VLLM_LOGGING_LEVEL"] == "INFO"
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "level", logger.level)  # put back afterwards
    choose_logging_level()
    assert logger.level == logging.INFO


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


@pytest.mark.parametrize(("updates_on_host", "threads"), [(False, "4"), (True, "12")])
def test_host_threads_of_a_rank(monkeypatch: pytest.MonkeyPatch, updates_on_host: bool, threads: str) -> None:
    """96 cores and 8 ranks: Adam on the host has all that a rank can have. Would not catch cores that others use."""
    monkeypatch.setattr("os.cpu_count", lambda: 96)
    variables = worker_environment("cuda", ranks_per_node=8, updates_on_host=updates_on_host)
    assert variables["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize("before", [None, "1"])
def test_groups_of_two_pools_survive_a_lost_peer(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    """torch reads the variable while it makes the group; others keep theirs. Would not catch another name of it."""
    if before is None:
        monkeypatch.delenv(ERROR_HANDLING, raising=False)
    else:
        monkeypatch.setenv(ERROR_HANDLING, before)
    with lost_peers_survived():
        assert os.environ[ERROR_HANDLING] == "0"
    assert os.environ.get(ERROR_HANDLING) == before
