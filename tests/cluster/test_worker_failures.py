"""What the driver hears when a rank raises, dies, hangs or cannot be built, and that nothing is left running.

Ranks hang that are stopped by a signal, or sleep while their peers wait for them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fragile_worker import FailsToUnpickle, FragileWorker
from launchers import BOTH, reserved

from megatron_rl.cluster.heartbeat import HeartbeatLimits
from megatron_rl.cluster.launcher import Launcher, Ranks
from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.pool_options import PoolOptions
from megatron_rl.errors import ConfigError, WorkerFailure, WorkerStall

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", params=BOTH)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pool(launcher: Launcher) -> Iterator[Ranks]:
    with reserved(launcher, 3) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def pair(launcher: Launcher) -> Iterator[Ranks]:
    with reserved(launcher, 2) as ranks:
        yield ranks


def test_an_exception_names_its_rank_and_ends_the_group(pool: Ranks) -> None:
    """Would not catch a failure on a rank whose clock is far off."""
    with ProcessPool("toys", pool, FragileWorker) as group:
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


def test_a_killed_rank_is_named_while_its_peers_hang_in_a_barrier(pool: Ranks) -> None:
    """Would not catch a rank that hangs without dying."""
    with ProcessPool("toys", pool, FragileWorker) as group:
        waiting = group.host(FragileWorker).barrier_all_but(1)
        with pytest.raises(TimeoutError):
            waiting.get(timeout=2)
        os.kill(group.pids[1], signal.SIGKILL)
        killed_at = time.monotonic()
        with pytest.raises(WorkerFailure, match=r"rank 1 \(host\): the process died during barrier_all_but"):
            waiting.get()
        assert time.monotonic() - killed_at < 30
        assert not any(psutil.pid_exists(pid) for pid in group.pids)


def test_a_lost_rank_is_named_though_its_peers_report_first(pool: Ranks) -> None:
    """The driver learns of its death 2 s after the others' reports, which is later than `grace_s`. Would not catch a
    rank whose death is known only after CAUSE_S.
    """
    with ProcessPool("toys", pool, FragileWorker, options=PoolOptions(grace_s=0.1)) as group:
        with pytest.raises(WorkerFailure, match=r"rank 1 \(host\): the process died during lose") as raised:
            group.host(FragileWorker).lose(1, 2.0).get()
        assert str(raised.value).endswith("2 other rank(s) failed after it: 0, 2")


def test_a_failure_nobody_asked_about_surfaces_at_the_next_call(pool: Ranks) -> None:
    """Would not catch a failure that happens after the last call, unless the group is left by its `with` block."""
    with ProcessPool("toys", pool, FragileWorker) as group:
        group.host(FragileWorker).answer_with_lock()
        with pytest.raises(WorkerFailure, match=r"rank 0 \(host\) raised TypeError in answer_with_lock: cannot pickle"):
            for _ in range(100):
                group.host(FragileWorker).nap(0.05)
                time.sleep(0.05)


def test_an_interrupted_driver_takes_its_workers_along(pool: Ranks) -> None:
    """Would not catch an interrupt outside of `get`, where only the `with` block helps."""
    with ProcessPool("toys", pool, FragileWorker) as group:
        pids = group.pids
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            group.host(FragileWorker).nap(600).get()
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_failing_constructor_is_reported_as_its_own_error(pool: Ranks) -> None:
    """Would not catch a constructor that hangs."""
    group = ProcessPool("toys", pool, FragileWorker, 2)
    with pytest.raises(ConfigError) as raised:
        group.start()
    assert str(raised.value) == "rank 2 (FragileWorker), in __init__: tp(3) does not divide num_heads(8)"
    assert len(group.pids) == 3 and not any(psutil.pid_exists(pid) for pid in group.pids)


def test_a_failing_import_on_the_ranks_is_reported(pool: Ranks) -> None:
    """Would not catch a module that imports on the ranks but in another version."""
    with pytest.raises(
        WorkerFailure, match=r"\(FragileWorker\) raised ImportError in __init__: no module named 'missing"
    ):
        ProcessPool("toys", pool, FragileWorker, FailsToUnpickle()).start()


def test_the_rank_that_its_peers_wait_for_is_named_with_its_stack(pair: Ranks, tmp_path: Path) -> None:
    """One sleeps, the other is in a barrier. Would not catch two ranks that wait for each other."""
    limits = HeartbeatLimits(stall_timeout_s=10, stacks_file=tmp_path / "stacks.txt")
    with ProcessPool("toys", pair, FragileWorker, -1, True) as group:
        group.monitor.limits = limits  # not before: to import torch may take longer
        pids = group.pids
        with pytest.raises(WorkerStall) as raised:
            group.host(FragileWorker).barrier_all_but(1).get(timeout=60)
        assert str(raised.value).startswith("rank 1 (host), in barrier_all_but: process ")
        assert "has made no progress for" in str(raised.value) and "trainer.stall_timeout_s=10" in str(raised.value)
        assert str(limits.stacks_file) in str(raised.value)
        assert "time.sleep(600)" in raised.value.__notes__[0]
        rank_0, rank_1 = limits.stacks_file.read_text().split("rank 1\n")
        assert "torch.distributed.barrier()" in rank_0 and "time.sleep(600)" in rank_1
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_stopped_process_is_named_and_removed(pair: Ranks) -> None:
    """In no method of its own: its peer stalls first. Would not catch a machine that is unplugged."""
    options = PoolOptions(limits=HeartbeatLimits(stall_timeout_s=600, heartbeat_timeout_s=10))
    with ProcessPool("toys", pair, FragileWorker, options=options) as group:
        pids = group.pids
        group.host(FragileWorker).nap(0).get()
        os.kill(pids[0], signal.SIGSTOP)
        stopped_at = time.monotonic()
        with pytest.raises(WorkerStall, match=r"rank 0 \(host\), in nap: .*no sign of life .* stopped by a signal"):
            group.host(FragileWorker).nap(600).get()
        assert time.monotonic() - stopped_at < 30
        assert not any(psutil.pid_exists(pid) for pid in pids)
