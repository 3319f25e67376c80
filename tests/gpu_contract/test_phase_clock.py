"""Phases are timed with the work that they gave the device; on a pretended CUDA whose work lies in a queue."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_rl import device as device_module
from megatron_rl.device import Device, release_cached, settled_seconds
from megatron_rl.hybrid_engine.allgather_pp import Bytes
from megatron_rl.hybrid_engine.hybrid_engine import HybridEngine


class Queue:
    """Seconds of work that were given and not yet done; doing them takes that long on its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waiting = 0.0, 0.0
        self.emptied = 0
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty)
        monkeypatch.setattr(device_module.time, "perf_counter", lambda: self.now)

    def synchronize(self) -> None:
        self.now, self.waiting = self.now + self.waiting, 0.0

    def empty(self) -> None:
        self.emptied += 1


class Working:
    """Weights and a generator that give the device work and return at once."""

    lower_bound = Bytes(1, 1)

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def gather(self) -> Bytes:
        self.queue.waiting += 5.0
        return Bytes(1, 1)

    def verify(self) -> None:
        self.queue.waiting += 2.0

    def wake(self) -> None:
        self.queue.waiting += 1.0

    def nothing(self) -> None:
        pass

    release = drop_training = restore_training = sleep = nothing


def test_a_phase_has_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before counts for nobody, gathering for the exchange. Would not catch work on another stream."""
    queue = Queue(monkeypatch)
    state = random.getstate()
    working = Working(queue)
    queue.waiting = 100.0
    engine = HybridEngine(working, working, Device("cuda"))
    report = engine.enter()
    assert (report.exchange_seconds, report.verify_seconds, report.seconds) == (5.0, 2.0, 8.0)
    assert queue.emptied == 1
    engine.exit()
    assert queue.emptied == 2
    random.setstate(state)


def test_the_cpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything of CUDA called there. Would not catch a call made elsewhere."""
    queue = Queue(monkeypatch)
    queue.waiting = 3.0
    assert settled_seconds(torch.device("cpu")) == 0.0 and queue.waiting == 3.0
    release_cached(torch.device("cpu"))
    assert queue.emptied == 0
