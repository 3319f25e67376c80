"""The ledger's arithmetic, and the meter on tensors whose lives are known."""

from __future__ import annotations

import torch
from storage_meter import StorageMeter

from megatron_rl.observe.memory_ledger import MemoryLedger, PhaseMemory, memory_metrics, storage_bytes


def test_ledger_keeps_the_largest_of_each_phase_until_it_is_taken():
    """Two runs of one phase, and another. Would not catch a device that never resets its peak."""
    held, peaks, resets = {"a": 1, "b": 5}, iter([7, 3, 4]), []
    ledger = MemoryLedger(lambda: dict(held), lambda: resets.append(1), lambda: next(peaks))
    with ledger.phase("update"):
        pass
    held |= {"a": 2, "b": 4}
    with ledger.phase("update"):
        pass
    ledger.note("save")
    taken = ledger.take()
    assert taken == {"update": PhaseMemory({"a": 2, "b": 5}, 7), "save": PhaseMemory({"a": 2, "b": 4}, 4)}
    assert len(resets) == 2 and ledger.take() == {}


def test_metrics_are_the_worst_ranks_beside_the_plan():
    """On a GPU the whole plan counts, on a CPU only what can be owned. Would not catch a phase without a plan."""
    planned = {"update": {"a": 2_000_000_000, "activations": 1_000_000_000}}
    cpu = [{"update": PhaseMemory({"a": 1_000_000_000})}, {"update": PhaseMemory({"a": 2_500_000_000})}]
    assert memory_metrics(cpu, planned) == {"perf/memory_gb/update": 2.5, "perf/memory_planned_gb/update": 2.0}
    cuda = [{"update": PhaseMemory({"a": 2_000_000_000}, 3_300_000_000)}, {"other": PhaseMemory({}, 500_000_000)}]
    assert memory_metrics(cuda, planned) == {
        "perf/memory_gb/update": 3.3,
        "perf/memory_planned_gb/update": 3.0,
        "perf/memory_gb/other": 0.5,
        "perf/max_memory_allocated_gb": 3.3,
    }


def test_storages_count_once_and_not_when_given_back():
    """Views share one. Would not catch memory that a library keeps without a tensor."""
    whole = torch.zeros(100)
    assert storage_bytes([whole, whole[10:], torch.zeros(3)]) == 412
    whole.untyped_storage().resize_(0)
    assert storage_bytes([whole]) == 0


def test_meter_sees_what_lives_for_a_moment_and_what_autograd_keeps():
    """1000 floats a tensor. Would not catch memory inside of a kernel."""
    weight = torch.ones(1000, requires_grad=True)
    meter = StorageMeter([weight], lambda: 100)
    with meter:
        doubled = weight * 2
        del doubled
        assert meter.peak == 4100
        squared = (weight * 2).exp()  # the product is freed, the result kept for backward
        assert meter.peak == 8100
        view = squared[:10]
        assert meter.peak == 8100
        view.sum().backward()
    assert meter.peak > 8100
    assert storage_bytes([weight.grad]) == 4000
