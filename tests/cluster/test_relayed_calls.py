"""A group that is called through one rank of each node: the same answers, and the same failures by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
from fragile_worker import FragileWorker
from toy_worker import Toy, ToyWorker

from megatron_rl.cluster.ray_pool import PoolOptions, RayPool
from megatron_rl.cluster.resource_pool import ResourcePool
from megatron_rl.errors import WorkerFailure
from megatron_rl.records import ragged

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def pool() -> Iterator[ResourcePool]:
    with ResourcePool(2, 2, "cpu") as pool:
        yield pool


def test_answers_are_those_of_direct_calls(pool: ResourcePool) -> None:
    """Split, whole, large and refused calls. Would not catch an answer that is copied once too often."""
    with RayPool("toys", pool, ToyWorker, options=PoolOptions(direct_ranks=3)) as group:
        tokens = ragged([torch.full((row + 1,), row) for row in range(5)])
        doubled = group.host(ToyWorker).double(Toy(torch.arange(5), tokens, torch.ones(5), batch_size=[5])).get()
        assert doubled.row.tolist() == [0, 1, 2, 3, 4] and doubled.weight.tolist() == [0, 0, 0, 2, 2]
        assert [received[0] for received in group.host(ToyWorker).last_received().get()] == [
            [0, 1, 2],
            [0, 1, 2],
            [3, 4],
            [3, 4],
        ]
        assert group.host(ToyWorker).environment("RANK").get() == ["0"]
        assert group.host(ToyWorker).nap(seconds=0).get() == [0, 1, 2, 3]
        nap = group.host(ToyWorker).nap(1.0)
        with pytest.raises(TimeoutError, match=r"nap: no report from ranks \[0, 1, 2, 3\]"):
            nap.get(timeout=0.1)
        assert nap.get() == [0, 1, 2, 3]


def test_a_rank_that_only_its_node_hears_is_named(pool: ResourcePool) -> None:
    """Rank 3 raises while rank 2, which relays to it, waits; then a killed one. Would not catch a lost heartbeat."""
    group = RayPool("toys", pool, FragileWorker, options=PoolOptions(direct_ranks=1))
    group.start()
    with pytest.raises(WorkerFailure, match=r"^rank 3 \(host\) raised ZeroDivisionError in divide_by_zero_on"):
        group.host(FragileWorker).divide_by_zero_on(3).get()
    with RayPool("toys", pool, FragileWorker, options=PoolOptions(direct_ranks=1)) as group:
        pids = group.pids
        waiting = group.host(FragileWorker).barrier_all_but(3)
        with pytest.raises(TimeoutError):
            waiting.get(timeout=2)
        os.kill(group.pids[3], signal.SIGKILL)
        killed_at = time.monotonic()
        with pytest.raises(WorkerFailure, match=r"rank 3 \(host\): the process died during barrier_all_but"):
            waiting.get()
        assert time.monotonic() - killed_at < 30
        assert not any(psutil.pid_exists(pid) for pid in pids)
