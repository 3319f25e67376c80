"""A group of four processes: what arrives where, and what comes back.

Also of one that is called through one rank of each node: the same answers, and the same failures by name.
"""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest
import torch
from fragile_worker import FragileWorker
from toy_worker import Toy, ToyWorker

from megatron_rl.cluster.hosting import PoolOptions
from megatron_rl.cluster.ray_pool import RayPool
from megatron_rl.cluster.ray_session import RaySession
from megatron_rl.cluster.resource_pool import ResourcePool
from megatron_rl.errors import ConfigError, WorkerFailure
from megatron_rl.records import ragged

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

FORKED = PoolOptions(preload=("toy_worker", "fragile_worker"))


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    with RaySession(10) as session:
        yield session


@pytest.fixture(scope="module")
def pool(session: RaySession) -> Iterator[ResourcePool]:
    with ResourcePool(2, 2, "cpu", session=session) as pool:
        yield pool


@pytest.fixture(scope="module")
def nodes(session: RaySession) -> Iterator[ResourcePool]:
    """For groups that are called through one rank of each."""
    with ResourcePool(2, 2, "cpu", session=session) as pool:
        yield pool


@pytest.fixture(scope="module")
def group(pool: ResourcePool) -> Iterator[RayPool]:
    with RayPool("toys", pool, ToyWorker, options=replace(FORKED, env={"TOY_COLOUR": "red"})) as group:
        yield group


def toy(num_rows: int) -> Toy:
    tokens = ragged([torch.full((row + 1,), row) for row in range(num_rows)])
    return Toy(torch.arange(num_rows), tokens, torch.ones(num_rows), batch_size=[num_rows])


def test_dp_splits_rows_unevenly_and_collects_one_answer_per_dp_rank(group: RayPool) -> None:
    """Would not catch a worker that mixes rows within its chunk."""
    doubled = group.host(ToyWorker).double(toy(5)).get()
    assert doubled.row.tolist() == [0, 1, 2, 3, 4]
    assert doubled.weight.tolist() == [0, 0, 0, 2, 2]
    assert [row.tolist() for row in doubled.tokens.unbind()] == [[2 * row] * (row + 1) for row in range(5)]
    rows = [received[0] for received in group.host(ToyWorker).last_received().get()]
    assert rows == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]


def test_fewer_rows_than_chunks_are_padded_neutrally_and_unpadded(group: RayPool) -> None:
    """Would not catch padding in an argument that is not a record."""
    doubled = group.host(ToyWorker).double_by_replica(toy(3)).get()
    assert doubled.row.tolist() == [0, 1, 2] and doubled.weight.tolist() == [3, 2, 1]
    assert group.host(ToyWorker).last_received().get() == [([0], [0.0]), ([2], [1.0]), ([1], [1.0]), ([0], [1.0])]


def test_other_answers_come_from_the_collectors(group: RayPool) -> None:
    """Would not catch metrics that differ between ranks, since the first collector's count."""
    assert group.host(ToyWorker).describe("dict", batch=toy(3)).get() == {"rank": 0}
    assert group.host(ToyWorker).describe("list", batch=toy(3)).get() == [[0, 0, 1], [2, 2]]
    assert group.host(ToyWorker).describe("none", batch=toy(3)).get() is None


def test_calls_overlap_and_a_time_out_leaves_the_group_alive(group: RayPool) -> None:
    """Would not catch calls that run one after the other but fast."""
    nap = group.host(ToyWorker).nap(1.0)
    behind = group.host(ToyWorker).environment("RANK")
    with pytest.raises(TimeoutError, match=r"nap: no report from ranks \[0, 1, 2, 3\] in 0.1 s"):
        nap.get(timeout=0.1)
    assert behind.get() == ["0"]
    assert nap.get() == nap.get() == [0, 1, 2, 3]


def test_workers_find_their_place_in_the_environment(group: RayPool) -> None:
    """Two "nodes" on one machine are one. Would not catch a master port that is taken before it is used."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TOY_COLOUR", "NODE_RANK", "NODE_ADDRESS")
    *place, node, address = group.host(ToyWorker).environment(*names).get()
    assert place == ["0", "4", "0", "2", "red"]
    assert (node, address) == ("0", "127.0.0.1")
    master, port = group.host(ToyWorker).environment("MASTER_ADDR", "MASTER_PORT").get()
    assert master == "127.0.0.1" and 1024 < int(port) < 65536


def test_no_process_waits_for_other_work(group: RayPool) -> None:
    """Ranks have environments of their own, so workers that Ray starts before it is asked would never have any.

    Would not catch one that has not started yet.
    """
    lines = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            lines.append(" ".join(process.cmdline()[:1]))
    assert [line for line in lines if line.startswith("ray::")], lines
    assert not [line for line in lines if line.startswith("ray::IDLE")], lines


def test_verbs_are_visible_and_unknown_ones_name_them(group: RayPool) -> None:
    """Would not catch a call with wrong arguments, which only the worker refuses."""
    assert list(inspect.signature(group.host(ToyWorker).double).parameters) == ["batch"]
    assert group.host(ToyWorker).double.__doc__ == ToyWorker.double.__doc__
    with pytest.raises(AttributeError, match="no method 'triple'.*: .*double, double_by_replica"):
        group.host(ToyWorker).triple()


def test_a_mistake_in_the_call_does_not_end_the_group(group: RayPool) -> None:
    """Would not catch a mistake that only shows on the worker, which does end it."""
    with pytest.raises(ValueError, match="same number of rows"):
        group.host(ToyWorker).double(toy(3), toy(2))
    assert group.host(ToyWorker).nap(0).get() == [0, 1, 2, 3]


def test_shutdown_leaves_no_process_and_later_calls_say_so(group: RayPool) -> None:
    """Would not catch processes left on another node. It ends the shared group."""
    pids = group.pids
    assert all(psutil.pid_exists(pid) for pid in pids)
    group.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(WorkerFailure, match="shut down"):
        group.host(ToyWorker).nap(0)


def test_a_pool_that_cannot_be_had_names_both_sides(pool: ResourcePool) -> None:
    """Would not catch a cluster that has the resources but not on one node."""
    with pytest.raises(ConfigError, match=r"99 x \[CPU 1, GPU 0\] each: its 1 node\(s\) have \[CPU 10, GPU \d+\]"):
        ResourcePool(1, 99, "cpu", ready_timeout_s=1).__enter__()


def test_worker_classes_that_cannot_be_a_group_are_refused(pool: ResourcePool) -> None:
    """Would not catch a `coordinates` method that answers with something else."""

    class Unplaced:
        pass

    with pytest.raises(TypeError, match="Unplaced must have a ONE_TO_ALL method `coordinates`"):
        RayPool("toys", pool, Unplaced)
    with pytest.raises(RuntimeError, match="start the pool toys before calling nap"):
        RayPool("toys", pool, ToyWorker).host(ToyWorker).nap(0)


def test_relayed_answers_are_those_of_direct_calls(nodes: ResourcePool) -> None:
    """Split, whole, large and refused calls. Would not catch an answer that is copied once too often."""
    with RayPool("toys", nodes, ToyWorker, options=replace(FORKED, direct_ranks=3)) as group:
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


def test_a_rank_that_only_its_node_hears_is_named(nodes: ResourcePool) -> None:
    """Rank 3 raises while rank 2, which relays to it, waits; then a killed one. Would not catch a lost heartbeat."""
    group = RayPool("toys", nodes, FragileWorker, options=replace(FORKED, direct_ranks=1))
    group.start()
    with pytest.raises(WorkerFailure, match=r"^rank 3 \(host\) raised ZeroDivisionError in divide_by_zero_on"):
        group.host(FragileWorker).divide_by_zero_on(3).get()
    with RayPool("toys", nodes, FragileWorker, options=replace(FORKED, direct_ranks=1)) as group:
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


def test_a_start_raises_what_it_has_failed_with(session: RaySession) -> None:
    """Also what is no error of ours: a host that takes itself for one of four ranks, on a pool of two."""
    with ResourcePool(1, 2, "cpu", session=session) as two, pytest.raises(ValueError, match="DP needs one collector"):
        RayPool("toys", two, ToyWorker, options=FORKED).start()
