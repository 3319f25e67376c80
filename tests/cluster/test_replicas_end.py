"""A cluster that is left while its replicas are in every state, and random kills: no process and no thread is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from replica_cluster import Driver, cluster_of, eventually, nothing_left, replicas, run_id_of, sampler, trainer
from replica_worker import ReplicaHost

from megatron_rl.cluster.heartbeat import HeartbeatLimits
from megatron_rl.cluster.replicas import ClusterEnded, Replica
from megatron_rl.cluster.waiting import wait_any
from megatron_rl.dispatch import Future
from megatron_rl.errors import WorkerFailure

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["local", "ray"])
def test_a_cluster_may_be_left_in_any_state_of_its_replicas(kind: str, tmp_path: Path) -> None:
    """In a call, dead unnoticed, stopped, processes coming up, hosts being built, and a child of a rank's own; each
    waited for by a thread. Would not catch what is left on another machine.
    """
    slow = tmp_path / "slow"
    with cluster_of(5, 1, slow=slow, kind=kind) as cluster:
        in_call, dead, stopped, coming_up, in_construction = replicas(cluster)
        run_id = run_id_of(cluster.pools["train"].pids[0])
        in_call.host(ReplicaHost).start_child().get()
        waiting = {
            in_call: sampler(in_call).count(0, 600.0),
            dead: sampler(dead).count(0, 600.0),
            stopped: sampler(stopped).count(0, 600.0),
        }
        os.kill(stopped.pids[0], signal.SIGSTOP)
        slow.touch()
        waiting[in_construction] = in_construction.restart()
        built = eventually(
            lambda: not wait_any([waiting[in_construction]], timeout=0.2) and bool(in_construction.pids), 60
        )
        assert built
        time.sleep(0.5)
        waiting[coming_up] = coming_up.restart()
        thread = Driver(lambda: [one.get() for one in waiting.values()])
        os.kill(dead.pids[0], signal.SIGKILL)
        left_at = time.monotonic()
    assert time.monotonic() - left_at < 30
    assert isinstance(thread.must_end_within(60), WorkerFailure)
    assert nothing_left(run_id)
    for future in waiting.values():
        with pytest.raises(WorkerFailure, match="rollout_pool/"):
            future.get()


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["gcs_server", "raylet"])
def test_without_ray_the_thread_that_calls_replicas_ends_too(victim: str) -> None:
    """It does not try to start them again. Would not catch a Ray that answers, but never in time."""
    driver = [sys.executable, Path(__file__).with_name("replica_lost_driver.py"), victim]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run(driver, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == WorkerFailure.exit_code, ended.stderr
    assert f"Ray's {victim} (process" in ended.stderr
    assert ended.stdout.splitlines()[-1] == "thread: ClusterEnded"


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [pytest.param("local", marks=pytest.mark.weekly), "ray"])
def test_random_kills_and_stops(kind: str) -> None:
    """Random ranks of 2 replicas of 2, at random times, starts included, until 8 starts have followed; a thread drives
    them all, and the training pool answers throughout. Would not catch a hang that takes a longer pause to come about.
    """
    draw = random.Random(5)
    with cluster_of(2, 2, HeartbeatLimits(stall_timeout_s=12, heartbeat_timeout_s=10), kind=kind) as cluster:
        run_id, both = run_id_of(cluster.pools["train"].pids[0]), replicas(cluster)
        over = threading.Event()
        thread = Driver(lambda: drive(both, over))
        while sum(one.num_restarts for one in both) < 8 and thread.is_alive():
            until = time.monotonic() + draw.uniform(0.0, 6.0)
            while time.monotonic() < until:
                assert trainer(cluster).count(7, 0.1).get()[0][0] == 7
            for pid in draw.choice(both).pids[draw.randrange(2) :][:1]:
                with suppress(ProcessLookupError):
                    os.kill(pid, draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
        over.set()
        assert thread.must_end_within(120) is None
        answered, restarts = thread.result
        print(f"answers {answered}, restarts {restarts}")
        assert min(answered) > 0 and sum(restarts) >= 8
        assert all(sampler(one).count(9).get() == [(9, one.pids[0])] for one in both)
    assert nothing_left(run_id)


def drive(all_replicas: list[Replica], over: threading.Event) -> tuple[list[int], list[int]]:
    """Call every replica again and again and restart those that fail, until each has answered a call made when it was
    `over`, as one made earlier may be answered by a rank that is dead by then: answers, restarts of each.
    """
    answered = [0] * len(all_replicas)
    calls: dict[Future, Replica] = {sampler(one).count(0, 0.05): one for one in all_replicas}
    starting: set[Replica] = set()
    last: set[Future] = set()
    while calls:
        for future in wait_any(list(calls)):
            replica = calls.pop(future)
            try:
                future.get()
                if replica not in starting:
                    answered[replica.number] += 1
                    if future in last:
                        continue
                starting.discard(replica)
                is_over = over.is_set()
                following: Future = sampler(replica).count(0, 0.05)
                if is_over:
                    last.add(following)
            except WorkerFailure as error:
                if isinstance(error, ClusterEnded):
                    raise
                starting.add(replica)
                following = replica.restart(timeout_s=60)
            calls[following] = replica
    return answered, [one.num_restarts for one in all_replicas]
