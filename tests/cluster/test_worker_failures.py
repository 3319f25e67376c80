"""What the driver hears when a rank raises, dies, or cannot be built, and that nothing is left running."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from fragile_worker import FailsToUnpickle, FragileWorker

from megatron_rl.cluster.ray_pool import RayPool
from megatron_rl.cluster.resource_pool import ResourcePool
from megatron_rl.errors import ConfigError, WorkerFailure

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def pool() -> Iterator[ResourcePool]:
    with ResourcePool(1, 3, "cpu") as pool:
        yield pool


def test_an_exception_names_its_rank_and_ends_the_group(pool: ResourcePool) -> None:
    """Would not catch a failure on a rank whose clock is far off."""
    with RayPool("toys", pool, FragileWorker) as group:
        pids = group.pids
        earlier = group.host(FragileWorker).nap(0)
        broken = group.host(FragileWorker).divide_by_zero_on(2)
        with pytest.raises(WorkerFailure) as raised:
            broken.get()
        message = str(raised.value)
        assert message.startswith("rank 2 (host) raised ZeroDivisionError in divide_by_zero_on: division by zero")
        assert "return 1 / 0" in message and "fragile_worker.py" in message
        assert message.endswith("2 other rank(s) failed after it: 0, 1")
        assert not any(psutil.pid_exists(pid) for pid in pids)
        for later in (earlier.get, broken.get, lambda: group.host(FragileWorker).nap(0)):
            with pytest.raises(WorkerFailure) as again:
                later()
            assert str(again.value) == message


def test_a_killed_rank_is_named_while_its_peers_hang_in_a_barrier(pool: ResourcePool) -> None:
    """Would not catch a rank that hangs without dying."""
    with RayPool("toys", pool, FragileWorker) as group:
        waiting = group.host(FragileWorker).barrier_all_but(1)
        with pytest.raises(TimeoutError):
            waiting.get(timeout=2)
        os.kill(group.pids[1], signal.SIGKILL)
        killed_at = time.monotonic()
        with pytest.raises(WorkerFailure, match=r"rank 1 \(host\): the process died during barrier_all_but"):
            waiting.get()
        assert time.monotonic() - killed_at < 30
        assert not any(psutil.pid_exists(pid) for pid in group.pids)


def test_a_failure_nobody_asked_about_surfaces_at_the_next_call(pool: ResourcePool) -> None:
    """Would not catch a failure that happens after the last call, unless the group is left by its `with` block."""
    with RayPool("toys", pool, FragileWorker) as group:
        group.host(FragileWorker).answer_with_lock()
        with pytest.raises(WorkerFailure, match=r"rank 0 \(host\).*answer_with_lock: TypeError: cannot pickle"):
            for _ in range(100):
                group.host(FragileWorker).nap(0.05)
                time.sleep(0.05)


def test_an_interrupted_driver_takes_its_workers_along(pool: ResourcePool) -> None:
    """Would not catch an interrupt outside of `get`, where only the `with` block helps."""
    with RayPool("toys", pool, FragileWorker) as group:
        pids = group.pids
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            group.host(FragileWorker).nap(600).get()
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_failing_constructor_is_reported_as_its_own_error(pool: ResourcePool) -> None:
    """Would not catch a constructor that hangs."""
    group = RayPool("toys", pool, FragileWorker, 2)
    with pytest.raises(ConfigError) as raised:
        group.start()
    assert str(raised.value) == "rank 2 (FragileWorker), in __init__: tp(3) does not divide num_heads(8)"
    assert len(group.pids) == 3 and not any(psutil.pid_exists(pid) for pid in group.pids)


def test_a_failing_import_on_the_ranks_is_reported(pool: ResourcePool) -> None:
    """Would not catch a module that imports on the ranks but in another version."""
    with pytest.raises(
        WorkerFailure, match=r"\(FragileWorker\) raised ImportError in __init__: no module named 'missing"
    ):
        RayPool("toys", pool, FragileWorker, FailsToUnpickle()).start()
