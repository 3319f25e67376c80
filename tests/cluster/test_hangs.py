"""Ranks that neither raise nor die: stopped by a signal, or in an endless loop while their peers wait for them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fragile_worker import FragileWorker

from megatron_rl.cluster.ray_pool import PoolOptions, RayPool
from megatron_rl.cluster.resource_pool import ResourcePool
from megatron_rl.cluster.watch import Limits
from megatron_rl.errors import WorkerStall

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def pool() -> Iterator[ResourcePool]:
    with ResourcePool(1, 2, "cpu") as pool:
        yield pool


def test_the_rank_that_its_peers_wait_for_is_named_with_its_stack(pool: ResourcePool, tmp_path: Path) -> None:
    """One sleeps, the other is in a barrier. Would not catch two ranks that wait for each other."""
    limits = Limits(stall_timeout_s=20, stacks_file=tmp_path / "stacks.txt")
    with RayPool("toys", pool, FragileWorker, options=PoolOptions(limits=limits)) as group:
        pids = group.pids
        with pytest.raises(WorkerStall) as raised:
            group.host(FragileWorker).barrier_all_but(1).get(timeout=60)
        assert str(raised.value).startswith("rank 1 (host), in barrier_all_but: process ")
        assert "has made no progress for" in str(raised.value) and "trainer.stall_timeout_s=20" in str(raised.value)
        assert str(limits.stacks_file) in str(raised.value)
        assert "time.sleep(600)" in raised.value.__notes__[0]
        rank_0, rank_1 = limits.stacks_file.read_text().split("rank 1\n")
        assert "torch.distributed.barrier()" in rank_0 and "time.sleep(600)" in rank_1
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_stopped_process_is_named_and_removed(pool: ResourcePool) -> None:
    """In no verb of its own: its peer stalls first. Would not catch a machine that is unplugged."""
    with RayPool(
        "toys", pool, FragileWorker, options=PoolOptions(limits=Limits(stall_timeout_s=600, heartbeat_timeout_s=10))
    ) as group:
        pids = group.pids
        group.host(FragileWorker).nap(0).get()
        os.kill(pids[0], signal.SIGSTOP)
        stopped_at = time.monotonic()
        with pytest.raises(WorkerStall, match=r"rank 0 \(host\), in nap: .*no sign of life .* stopped by a signal"):
            group.host(FragileWorker).nap(600).get()
        assert time.monotonic() - stopped_at < 30
        assert not any(psutil.pid_exists(pid) for pid in pids)
