"""CUDA's form of memory that keeps its addresses: which of vLLM's allocations, in which order, marked as vLLM does it.

vLLM's allocator is its own class, and the entries of its table are its own; the driver's two calls are stood in for by
pages of host memory that are dropped. No test here sees a GPU.
"""

from __future__ import annotations

import ast
import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.device_allocator import AllocationData, cumem

from megatron_rl.device import GIVEN_BACK, GivenBack
from megatron_rl.hybrid_engine.cuda_memory import MappedMemory, allocations_of, allocator
from megatron_rl.hybrid_engine.stable_memory import drop_pages, own_pages
from megatron_rl.rollout.kv_cache import POOL, POOL_OPTION

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")
MIB = 1 << 20


def entry(base: int, num_bytes: int, tag: str) -> AllocationData:
    """As `_python_malloc_callback` makes them: device, bytes, address, what the driver calls it."""
    return AllocationData((0, num_bytes, base, 7000 + base), tag)


class Driver:
    """Stands in for the driver: says what it was asked, and takes the memory away. limit: bytes that it has."""

    def __init__(self, limit: int | None = None) -> None:
        self.asked: list[tuple[str, int]] = []
        self.limit, self.mapped = limit, 0

    def create_and_map(self, handle: Any) -> None:
        self.asked.append(("map", handle[2]))
        if self.limit is not None and self.mapped + handle[1] > self.limit:
            raise RuntimeError("CUDA Error: out of memory at /cumem_allocator.cpp:139")
        self.mapped += handle[1]

    def unmap_and_release(self, handle: Any) -> None:
        self.asked.append(("unmap", handle[2]))
        self.mapped -= handle[1]
        drop_pages(handle[2], 0, handle[1])


class Scene:
    """Three buffers of 1 MiB in vLLM's table, two of them with one tag and one of them that nobody looks at."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.vllms = driver, cumem.CuMemAllocator()
        self.data = [own_pages(MIB, torch.uint8) for _ in range(3)]
        self.bases = [one.data_ptr() for one in self.data]
        for base, tag in zip(self.bases, ("kv_cache", "kv_cache", "other"), strict=True):
            self.vllms.pointer_to_data[base] = entry(base, MIB, tag)
        driver.mapped = 3 * MIB

    def memory(self, *numbers: int, tag: str = "kv_cache") -> MappedMemory:
        storages = [self.data[number].untyped_storage() for number in numbers]
        calls = self.driver.create_and_map, self.driver.unmap_and_release
        return MappedMemory(storages, tag, CPU, self.vllms.pointer_to_data, *calls)

    def asleep(self) -> list[bool]:
        return [self.vllms.pointer_to_data[base].is_asleep for base in self.bases]


def test_allocations_are_found_by_what_lies_in_them() -> None:
    """By hand: several storages of one, one at its end, and none twice. Would not catch a table that is not vLLM's."""
    table = {base: entry(base, 100, tag) for base, tag in ((1000, "a"), (500, "a"), (2000, "b"), (700, "a"))}
    assert list(allocations_of(table, "a", [(1010, 20), (1030, 70), (500, 100)])) == [500, 1000]
    assert list(allocations_of(table, "a", [])) == []
    assert allocations_of(table, "b", [(2000, 1)])[2000] is table[2000]


def test_storages_elsewhere_are_refused() -> None:
    """Another tag's, the trainer's own, and one that stands out. Would not catch neighbours in one allocation."""
    table = {1000: entry(1000, 100, "a"), 2000: entry(2000, 100, "b")}
    with pytest.raises(ValueError, match=r"tagged 'a'; this is tagged 'b' \(tags there: a, b\)"):
        allocations_of(table, "a", [(1000, 5), (2000, 5)])
    for place in ((900, 5), (1090, 20), (990, 20)):
        with pytest.raises(ValueError, match="is not vLLM's cumem allocator's"):
            allocations_of(table, "a", [place])
    with pytest.raises(ValueError, match="tags there: none"):
        allocations_of({}, "a", [(1, 1)])


def test_rounds_keep_addresses_and_take_only_their_own() -> None:
    """Twenty rounds: what is asked of the driver, in which order, and content. Would not catch the driver itself."""
    scene = Scene(Driver())
    memory = scene.memory(1, 0)
    own, scene.data[2][:] = sorted(scene.bases[:2]), 9
    assert memory.num_bytes == 2 * MIB and memory.is_allocated
    for value in range(20):
        scene.driver.asked.clear()
        scene.data[0].fill_(value)
        scene.data[1].fill_(value + 1)
        memory.allocate()  # is there
        assert scene.driver.asked == [] and scene.data[0].eq(value).all() and scene.data[1].eq(value + 1).all()
        memory.release()
        memory.release()
        assert scene.driver.asked == [("unmap", base) for base in own] and not memory.is_allocated
        assert scene.asleep() == [True, True, False] and scene.driver.mapped == MIB
        memory.allocate()
        assert scene.driver.asked[2:] == [("map", base) for base in own] and memory.is_allocated
        assert scene.asleep() == [False] * 3 and [one.data_ptr() for one in scene.data] == scene.bases
        scene.data[0].fill_(3)
        memory.clear()
        assert not scene.data[0].any() and scene.data[2].eq(9).all()


def test_tags_come_and_go_by_themselves() -> None:
    """One buffer of a tag leaves, its neighbour of the same tag stays. Would not catch a wrong tag in vLLM."""
    scene = Scene(Driver())
    first, second, other = scene.memory(0), scene.memory(1), scene.memory(2, tag="other")
    first.release()
    other.release()
    assert (first.is_allocated, second.is_allocated, other.is_allocated) == (False, True, False)
    other.allocate()
    assert scene.asleep() == [True, False, False]


def test_too_little_memory_changes_nothing() -> None:
    """The second of two does not fit: neither is mapped, and the next try is whole. Would not catch a lost context."""
    scene = Scene(Driver())
    memory = scene.memory(0, 1)
    memory.release()
    scene.driver.limit = scene.driver.mapped + MIB
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory: 2 MiB of kv_cache: .*cumem_allocator"):
        memory.allocate()
    assert scene.asleep() == [True, True, False] and scene.driver.mapped == MIB and not memory.is_allocated
    scene.driver.limit = None
    memory.allocate()
    assert scene.asleep() == [False] * 3 and scene.driver.mapped == 3 * MIB


def test_other_errors_of_the_driver_are_its_own() -> None:
    """Would not catch one that says out of memory and means another."""
    scene = Scene(Driver())

    def fails(handle: Any) -> None:
        raise RuntimeError("CUDA Error: an illegal memory access was encountered")

    storages = [scene.data[0].untyped_storage()]
    memory = MappedMemory(storages, "kv_cache", CPU, scene.vllms.pointer_to_data, fails, fails)
    with pytest.raises(RuntimeError, match="illegal"):
        memory.release()
    with pytest.raises(RuntimeError, match="illegal"):
        memory.allocate()


def test_vllm_leaves_alone_what_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own sleep, discard and trimming pass over marked entries. Would not catch one that is freed."""
    scene = Scene(Driver())
    calls: list[int] = []
    monkeypatch.setattr(cumem, "unmap_and_release", lambda handle: calls.append(handle[2]))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    scene.memory(0).release()
    scene.vllms.discard("kv_cache")
    assert calls == [scene.bases[1]]

    class Pool:
        def snapshot(self) -> list[dict[str, int]]:
            return [{"address": base, "allocated_size": 0} for base in scene.bases[:2]]

    scene.vllms._trim(Pool())
    scene.vllms.sleep(())
    assert calls == scene.bases[1:] and set(scene.bases) == scene.vllms.pointer_to_data.keys()


def test_vllms_own_methods_would_take_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why single allocations: waking one tag maps all but vLLM's two. Fails when vLLM wakes by tag alone."""
    vllms, mapped = cumem.CuMemAllocator(), []
    monkeypatch.setattr(cumem, "create_and_map", lambda handle: mapped.append(handle[2]))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    for base, tag in ((1, "kv_cache"), (2, "ours"), (3, "another of ours")):
        vllms.pointer_to_data[base] = entry(base, 1, tag)
        vllms.pointer_to_data[base].is_asleep = True
    vllms.wake_up(["ours"])
    assert mapped == [2, 3]


def test_the_interface_of_the_cumem_allocator() -> None:
    """Names, arguments and fields. Would not catch what they do on a GPU."""
    assert list(inspect.signature(cumem.create_and_map).parameters) == ["allocation_handle"]
    assert list(inspect.signature(cumem.unmap_and_release).parameters) == ["allocation_handle"]
    assert list(inspect.signature(cumem.CuMemAllocator.use_memory_pool).parameters) == ["self", "tag"]
    made = cumem.CuMemAllocator()
    made.current_tag = "ours"
    made._python_malloc_callback((0, 2 * MIB, 4096, 1))
    assert made.pointer_to_data == {4096: AllocationData((0, 2 * MIB, 4096, 1), "ours", None, False)}
    with pytest.raises(RuntimeError, match=r"no cumem allocator \(vllm.cumem_allocator\)"):
        allocator()  # of this build, which is for CPUs


def test_vllms_sleep_mode_is_not_for_us() -> None:
    """It wants an allocator that nobody has used, and foreign stages are in it. Fails when that is no longer so."""
    source = (Path(vllm.__file__).parent / "v1/worker/gpu_worker.py").read_text()
    assert "assert allocator.get_current_usage() == 0" in source
    scene = Scene(Driver())
    assert scene.vllms.get_current_usage() == 3 * MIB


@pytest.mark.exhaustive
def test_only_the_kv_cache_is_made_in_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all tags that vLLM's worker asks for, through our worker's method. Would not catch one made elsewhere."""
    from megatron_rl.rollout import cuda_worker

    entered: list[str] = []

    @contextmanager
    def pool(tag: str) -> Iterator[None]:
        entered.append(tag)
        yield

    monkeypatch.setattr(cuda_worker, "pool", pool)
    source = (Path(vllm.__file__).parent / "v1/worker/gpu_worker.py").read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    asks = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == ASKED]
    tags = [ast.literal_eval((call.args or [keyword.value for keyword in call.keywords])[0]) for call in asks]
    assert POOL in tags and len(tags) > 2
    worker = cuda_worker.StableWorker.__new__(cuda_worker.StableWorker)
    for options in ({}, {POOL_OPTION: "of a judge"}):
        worker.vllm_config = SimpleNamespace(additional_config=options)
        for tag in tags:
            with getattr(worker, ASKED)(tag=tag):
                pass
    assert entered == [POOL, "of a judge"]


ASKED = "_maybe_get_memory_pool_context"


def test_both_runners_make_the_cache_in_the_context_that_they_are_given() -> None:
    """From the worker's call down to the allocation. Would not catch a layer that is allocated elsewhere."""
    from vllm.v1.worker.gpu import attn_utils
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as FirstRunner

    name = "kv_cache_allocation_context"
    for function in (attn_utils.init_kv_cache, GPUModelRunner.initialize_kv_cache, FirstRunner.initialize_kv_cache):
        assert name in inspect.signature(function).parameters
    assert "with allocation_context:" in inspect.getsource(attn_utils.init_kv_cache)


@pytest.mark.exhaustive
def test_cuda_takes_our_worker(vllm_config: Any, cuda_platform: type) -> None:
    """It is in vLLM's configuration, can be imported by its name, and CUDA's platform leaves it. Would not catch what a
    method that it inherits does there.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.gpu_worker import Worker

    assert vllm_config.parallel_config.worker_cls == "megatron_rl.rollout.cuda_worker.StableWorker"
    assert issubclass(resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls), Worker)
    assert 'if parallel_config.worker_cls == "auto"' in inspect.getsource(cuda_platform.check_and_update_config)
    assert vllm_config.model_config.enable_sleep_mode is vllm_config.model_config.enable_cumem_allocator is False


def test_what_is_away_is_not_counted() -> None:
    """Torch goes on counting it: least bytes away since a measurement began, by GPU. By hand, and against a replay."""
    away = GivenBack()
    assert away.least(0) == 0
    away.note(1, 0, 100)
    assert away.least(0) == 0  # it was there when the measurement began
    away.begin(0)
    away.note(2, 0, 30)
    away.note(3, 1, 7)
    assert (away.least(0), away.least(1)) == (100, 0)
    away.note(1, 0, 0)
    assert away.least(0) == 30
    away.note(1, 0, 100)
    assert away.least(0) == 30
    away.begin(0)
    assert away.least(0) == 130
    draw, sizes, lows = random.Random(1), {}, [0]
    replayed = GivenBack()
    for _ in range(200):
        owner, num_bytes = draw.randrange(4), draw.choice((0, draw.randrange(1, 50)))
        sizes[owner] = num_bytes
        replayed.note(owner, 0, num_bytes)
        lows.append(sum(sizes.values()))
        if draw.random() < 0.1:
            replayed.begin(0)
            lows = lows[-1:]
        assert replayed.least(0) == min(lows)


def test_mapped_memory_says_what_is_away() -> None:
    """Bytes of its storages, until it is taken again or nobody names it. Would not catch torch's own count."""
    scene = Scene(Driver())
    memory = scene.memory(0, 1)
    index: Any = CPU.index
    memory.release()
    GIVEN_BACK.begin(index)
    assert GIVEN_BACK.least(index) == 2 * MIB
    memory.allocate()
    assert GIVEN_BACK.least(index) == 0
    memory.release()
    GIVEN_BACK.begin(index)
    del memory
    assert GIVEN_BACK.least(index) == 0
