"""Replicas that are killed, hang and are started again, while another one and a training pool go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launchers import BOTH, RAY
from replica_cluster import ROLLOUT, Driver, are_gone, cluster_of, eventually, replicas, sampler, trainer
from replica_worker import ReplicaHost

from megatron_rl.cluster.heartbeat import HeartbeatLimits
from megatron_rl.cluster.process_cluster import ProcessCluster
from megatron_rl.cluster.replicas import ClusterEnded
from megatron_rl.cluster.stale_processes import living
from megatron_rl.cluster.waiting import wait_any
from megatron_rl.dispatch import Future
from megatron_rl.errors import WorkerFailure, WorkerStall

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

LIMIT_S, HEARTBEAT_S = 12.0, 7.0


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, the building of a host takes a minute."""
    return tmp_path_factory.mktemp("hosts") / "slow"


@pytest.fixture(scope="module", params=BOTH)
def cluster(request: pytest.FixtureRequest, slow: Path) -> Iterator[ProcessCluster]:
    """Two replicas of two ranks each."""
    if request.param == RAY:
        request.getfixturevalue("running_ray")
    limits = HeartbeatLimits(LIMIT_S, HEARTBEAT_S, slow.with_name("stacks.txt"))
    with cluster_of(2, 2, limits, slow, kind=request.param) as cluster:
        yield cluster


def test_a_replica_is_a_world_of_its_own_and_knows_its_number(cluster: ProcessCluster) -> None:
    """By hand. Would not catch a wrong device on a machine with GPUs."""
    assert list(cluster.pools) == ["train"] and list(cluster.replicated) == [ROLLOUT]
    first, second = replicas(cluster)
    assert (first.name, second.name, second.ranks) == ("rollout_pool/0", "rollout_pool/1", range(2, 4))
    for replica in (first, second):
        answers = replica.host(ReplicaHost).where().get()
        assert [(pool, place.rank, place.world_size, place.local_rank, own) for pool, place, own in answers] == [
            (ROLLOUT, 0, 2, 0, 2),
            (ROLLOUT, 1, 2, 1, 2),
        ]
        assert [(place.replica, place.num_replicas, place.first_rank) for _, place, _ in answers] == [
            (replica.number, 2, 2 * replica.number)
        ] * 2
        assert [place.first_rank + place.rank for _, place, _ in answers] == list(replica.ranks)
    stores = {replica.host(ReplicaHost).where().get()[0][1].master_store for replica in (first, second)}
    assert len(stores) == 2 and None not in stores
    [(pool, place, _)] = cluster.pools["train"].host(ReplicaHost).where().get()
    assert (pool, place.replica, place.num_replicas, place.first_rank + place.rank) == ("train", 0, 1, 0)


def test_a_killed_rank_ends_its_replica_alone_and_it_comes_back(cluster: ProcessCluster, tmp_path: Path) -> None:
    """While all are in calls. Would not catch memory of a device that the killed process still holds."""
    first, second = replicas(cluster)
    train_pids, first_pids, second_pids = cluster.pools["train"].pids, first.pids, second.pids
    children = first.host(ReplicaHost).start_child().get()
    training = trainer(cluster).count(1, 4.0)
    dying, going_on = sampler(first).count(0, 60.0), sampler(second).count_once_there(2, f"{tmp_path}/there")
    os.kill(first_pids[1], signal.SIGKILL)
    assert wait_any([dying, going_on]) == [dying]
    with pytest.raises(WorkerFailure, match=r"^pool rollout_pool/0, rank 1 \(sampler\): the process died during count"):
        dying.get()
    assert not living_now(first_pids)
    with pytest.raises(WorkerFailure, match="rollout_pool/0, rank 1"):
        sampler(first).count(3)
    assert str(first.error).startswith("pool rollout_pool/0, rank 1")

    starting = first.restart(timeout_s=60)
    (tmp_path / "there").touch()
    assert not living_now(children)
    waiting: list[Future] = [starting, going_on]
    assert wait_any(waiting) == [going_on] and going_on.get() == [(2, second_pids[0])]
    assert wait_any([starting], timeout=60) == [starting]
    starting.get()
    assert first.error is None and first.num_restarts == 1 and not set(first.pids) & set(first_pids)
    assert sampler(first).count(4).get() == [(4, first.pids[0])]
    with pytest.raises(WorkerFailure, match="rollout_pool/0, rank 1"):  # of the earlier processes
        dying.get()
    assert training.get() == [(1, train_pids[0])]
    assert (cluster.pools["train"].pids, second.pids) == (train_pids, second_pids)


def test_a_failing_verb_names_replica_and_peers_and_a_slow_start_fails(cluster: ProcessCluster, slow: Path) -> None:
    """Both ranks raise; then hosts are never built, which takes no longer than it may; the next start succeeds.

    Would not catch a rank that raises long after its peer, nor a driver that is late itself.
    """
    first, second = replicas(cluster)
    failing = sampler(second).fail()
    with pytest.raises(WorkerFailure) as raised:
        wait_any([failing])[0].get()
    assert str(raised.value).startswith("pool rollout_pool/1, rank ")
    assert "(sampler) raised OSError in fail: no room" in str(raised.value)
    assert "1 other rank(s) failed after it: rollout_pool/1 " in str(raised.value)
    assert sampler(first).count(1).get()[0][0] == 1
    slow.touch()
    began = time.monotonic()
    starting = second.restart(timeout_s=3)
    with pytest.raises(WorkerFailure, match=r"^\d of \d [\w ]+ of pool rollout_pool/1 .* in 3 s; does another"):
        starting.get()
    assert 3 <= time.monotonic() - began < 30  # not the minute that the host would take
    slow.unlink()
    second.restart().get()
    assert sampler(first).count(3).get() == [(3, first.pids[0])]
    assert sampler(second).count(2).get() == [(2, second.pids[0])]


@pytest.mark.exhaustive
@pytest.mark.parametrize("stopped", [True, False], ids=["SIGSTOP", "sleeps"])
def test_a_replica_that_hangs_ends_while_the_other_answers(cluster: ProcessCluster, slow: Path, stopped: bool) -> None:
    """Within two time-outs. Would not catch a machine that is unplugged."""
    first, second = replicas(cluster)
    pids = first.pids
    hanging = sampler(first).sleep_on(1, 600.0)
    if stopped:
        os.kill(pids[1], signal.SIGSTOP)
    began, answers = time.monotonic(), 0
    other = sampler(second).count(0, 0.1)
    while hanging not in (ready := wait_any([hanging, other])):
        assert ready == [other] and time.monotonic() - began < 2 * LIMIT_S
        assert other.get() == [(answers, second.pids[0])]
        answers += 1
        other = sampler(second).count(answers, 0.1)
    with pytest.raises(WorkerStall, match=r"^pool rollout_pool/0, rank 1 \(sampler\), in sleep_on: process"):
        hanging.get()
    assert time.monotonic() - began < 2 * LIMIT_S and answers >= 20
    assert are_gone(pids)
    assert slow.with_name("stacks_rollout_pool_0.txt").read_text().startswith("rank 0\n")
    assert trainer(cluster).count(7).get() == [(7, cluster.pools["train"].pids[0])]
    first.restart().get()
    assert sampler(first).count(8).get() == [(8, first.pids[0])]
    assert other.get() == [(answers, second.pids[0])]


@pytest.mark.exhaustive
def test_a_rank_that_is_stopped_in_its_constructor_is_noticed(cluster: ProcessCluster, slow: Path) -> None:
    """The start fails long before its own limit; the other replica answers. Would not catch one that is stopped before
    it has its message to construct.
    """
    first, second = replicas(cluster)
    slow.touch()
    starting = first.restart()
    assert eventually(lambda: not wait_any([starting], timeout=0.2) and builds_its_host(first.pids))
    pids = first.pids
    os.kill(pids[1], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(WorkerStall, match=r"rank 1 \(ReplicaHost\), in __init__: .* no sign of life "):
        starting.get()
    assert time.monotonic() - began < 40  # not the minute that the host would take
    assert are_gone(pids)
    slow.unlink()
    assert sampler(second).count(5).get() == [(5, second.pids[0])]
    first.restart().get()
    assert sampler(first).count(6).get() == [(6, first.pids[0])]


def builds_its_host(pids: list[int]) -> bool:
    """Whether the last of a replica's ranks, whose title names its method, is in its host's constructor."""
    return pids != [] and psutil.Process(pids[-1]).cmdline()[0].endswith("__init__")


def test_a_wait_ends_at_its_time_out_and_takes_futures_of_pools_only(cluster: ProcessCluster) -> None:
    """Would not catch a wait that is late by less than a second."""
    first, second = replicas(cluster)
    slow = [sampler(first).count(0, 2.0), sampler(second).count(1, 2.0)]
    began = time.monotonic()
    assert wait_any(slow, timeout=0.3) == []
    assert time.monotonic() - began >= 0.3
    assert {number for future in slow for number, _ in future.get()} == {0, 1}
    assert wait_any(slow, timeout=0) == slow
    with pytest.raises(TypeError, match="wait_any waits for futures of pools, at least one"):
        wait_any([Future.done(1)])
    with pytest.raises(TypeError, match="at least one"):
        wait_any([])


def test_a_failed_training_pool_ends_the_replicas_and_the_thread_that_waits_for_them(cluster: ProcessCluster) -> None:
    """It ends the shared cluster. Would not catch a thread that waits for something else than a replica."""
    pids = [pid for pool in (cluster.pools["train"], *replicas(cluster)) for pid in pool.pids]
    calls: list[Future] = [sampler(replica).count(0, 600.0) for replica in replicas(cluster)]
    thread = Driver(lambda: wait_any(calls)[0].get())
    with pytest.raises(WorkerFailure, match=r"^pool train, rank 0 \(sampler\) raised OSError in fail: no room"):
        trainer(cluster).fail().get()
    assert len(pids) == 5 and not living_now(pids)
    error = thread.must_end_within(60)
    assert isinstance(error, ClusterEnded) and "raised OSError in fail: no room" in str(error)
    for attempt in (lambda: replicas(cluster)[0].restart(), lambda: sampler(replicas(cluster)[1]).count(1)):
        with pytest.raises(ClusterEnded, match=r"^the replica rollout_pool/\d ended with its cluster, because pool tr"):
            attempt()
    assert not living_now(pids)


def living_now(pids: list[int]) -> list[int]:
    """Those that neither have gone nor wait, dead, for a parent that never looks."""
    return [one.pid for one in living(psutil.Process(pid) for pid in pids if psutil.pid_exists(pid))]
