"""The companion of ranks on a node without a driver: what it ends when one rank has ended, and what it lets live."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from replica_cluster import GONE_S, eventually, lives

from megatron_rl.cluster import reaper
from megatron_rl.cluster.leftovers import REPLICA, RUN_ID, end, processes_with
from megatron_rl.cluster.reaper import replicas_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

RANK = """
import ctypes, subprocess, sys, time
from megatron_rl.cluster import reaper
reaper.PEERS_GRACE_S = 0.5
kept = reaper.settle_in()
child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
ctypes.CDLL(None).prctl(15, b"ray::Toy")  # PR_SET_NAME, as Ray does
print(child.pid, flush=True)
time.sleep(600)
"""


class Node:
    """Ranks of one run, on a machine of their own as far as they know."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.folder = Path(tempfile.gettempdir()) / f"megatron_rl-{os.getuid()}" / run_id

    def rank(self, replica: str | None) -> tuple[subprocess.Popen, list[int]]:
        """A rank, once it has settled in, and its pid and its child's."""
        env = (
            os.environ
            | {RUN_ID: self.run_id, "PYTHONPATH": os.getcwd()}
            | ({} if replica is None else {REPLICA: replica})
        )
        process = subprocess.Popen([sys.executable, "-c", RANK], env=env, stdout=subprocess.PIPE, text=True)
        return process, [process.pid, int(process.stdout.readline())]


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node(uuid.uuid4().hex[:10])
    yield node
    assert end(lambda: processes_with(node.run_id)) == []


def kill(rank: tuple[subprocess.Popen, list[int]]) -> Callable[[], bool]:
    """SIGKILL to a rank; whether it and its child are gone."""
    process, pids = rank
    process.kill()
    process.wait()
    return lambda: not any(map(lives, pids))


@contextmanager
def held_up(node: Node) -> Iterator[None]:
    """Keep the node's companion from going on, as a busy machine does."""
    started = [reaper.__name__, node.run_id]
    [companion] = [one for one in psutil.process_iter(["cmdline"]) if (one.info["cmdline"] or [])[2:4] == started]
    companion.suspend()
    try:
        yield
    finally:
        companion.resume()


def test_the_end_of_a_replica_is_not_that_of_the_node(node: Node) -> None:
    """Three replicas end one after the other, the one with the companion first; one of them comes back in between, and
    the second ends before the companion has got further.

    Would not catch a rank that Ray has not yet given its name, nor one that ends before the companion has seen any end.
    """
    first, second, third = (node.rank(f"rollout_pool/{number}") for number in range(3))
    assert eventually(kill(first))
    with held_up(node):
        again = node.rank("rollout_pool/0")
        assert all(map(lives, second[1] + third[1])) and node.folder.exists()
        second_is_gone = kill(second)
    assert eventually(second_is_gone)
    assert all(map(lives, again[1] + third[1]))
    for rank in (third, again):
        process, _ = rank
        process.kill()
        process.wait()
    assert eventually(lambda: not processes_with(node.run_id) and not node.folder.exists())


def test_the_end_of_a_training_rank_is_that_of_the_node(node: Node) -> None:
    """It has no companion of its own: the replica that has one ends first. Would not catch a rank that hangs."""
    replica, train, other = node.rank("rollout_pool/0"), node.rank(None), node.rank("rollout_pool/1")
    assert eventually(kill(replica))
    assert all(map(lives, train[1] + other[1]))
    train[0].kill()
    train[0].wait()
    assert eventually(lambda: not processes_with(node.run_id) and not node.folder.exists())
    other[0].wait(GONE_S)


def test_a_rank_that_has_just_ended_is_none_of_training(node: Node) -> None:
    """Nothing can be read of it any more, nor its replica. Would not catch a process that only is called like one."""
    (replica, pids), train = node.rank("rollout_pool/0"), node.rank(None)
    seen = processes_with(node.run_id)
    assert replicas_of(seen, node.run_id) == {pids[0]: "rollout_pool/0", train[0].pid: None}
    replica.kill()
    os.waitid(os.P_PID, replica.pid, os.WEXITED | os.WNOWAIT)  # nobody has noticed its end
    assert replicas_of(seen, node.run_id) == {train[0].pid: None}
    replica.wait()
    assert replicas_of(seen, node.run_id) == {train[0].pid: None}
    train[0].kill()
    train[0].wait()
