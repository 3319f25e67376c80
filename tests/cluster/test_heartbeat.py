"""Which ranks count as failed, judged from their last signs of life; and real connections, right and wrong."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_rl.cluster import heartbeat
from megatron_rl.cluster.calls import failures_of
from megatron_rl.cluster.handle import Target
from megatron_rl.cluster.heartbeat import (
    LONGEST_HELLO,
    LOOK_S,
    MISSED_SIGNS_S,
    MORE_STRANGERS,
    RECONNECT_S,
    Connection,
    Hang,
    Heartbeat,
    HeartbeatLimits,
    HeartbeatMonitor,
    Sign,
    excused,
    judge,
    waits_for_peers,
)
from megatron_rl.cluster.launcher import ProcessInfo
from megatron_rl.cluster.pool import at_work
from megatron_rl.cluster.routing import Route
from megatron_rl.dispatch import Dispatch, RemoteMethod
from megatron_rl.observe.liveness import WorkDone, counting, current_work, finished_one, made_progress

LIMITS = HeartbeatLimits(stall_timeout_s=100, heartbeat_timeout_s=30)
NOW = 1000.0


def sign(
    silence: float, method: str = "update", idle_s: float = 0.0, connection=Connection.OPEN, gap_s: float = 2.0
) -> Sign:
    return Sign(NOW - silence, connection, "actor", method, idle_s, gap_s=gap_s)


@pytest.mark.parametrize(
    ("signs", "expected"),
    [
        ([sign(1), sign(29)], {}),
        ([sign(1), sign(31)], {1: Hang.SILENT}),
        ([sign(1, idle_s=98.5), sign(1)], {}),
        ([sign(1, idle_s=99.5), sign(1)], {0: Hang.STALLED}),
        # Nothing is expected of a rank between two methods.
        ([sign(1, method="", idle_s=500)], {}),
        # Ranks that stall wait for the one that was not heard lately.
        ([sign(1, idle_s=100), sign(MISSED_SIGNS_S + 1), sign(1, idle_s=100)], {1: Hang.SILENT}),
        ([sign(1, idle_s=100), sign(MISSED_SIGNS_S - 1)], {0: Hang.STALLED}),
        # A broken connection may come back.
        ([sign(RECONNECT_S - 1, connection=Connection.BROKEN), sign(1)], {}),
        ([sign(RECONNECT_S + 1, connection=Connection.BROKEN), sign(40)], {0: Hang.GONE}),
        # One that never came is silent, not gone.
        ([Sign(NOW - 29)], {}),
        ([Sign(NOW - 31)], {0: Hang.SILENT}),
        # Where a living rank speaks every 8 s, four times as long as others, 15 missed signs take four times as long.
        ([sign(1, gap_s=8), sign(119, method="")], {}),
        ([sign(1, gap_s=8), sign(121, method="")], {1: Hang.SILENT}),
        ([sign(1, gap_s=8), sign(4 * RECONNECT_S - 1, connection=Connection.BROKEN)], {}),
        ([sign(1, gap_s=8, idle_s=100), sign(4 * MISSED_SIGNS_S - 1)], {0: Hang.STALLED}),
        # A rank that is silent itself is no measure, nor one that speaks more often than it must.
        ([sign(1), sign(31, gap_s=20)], {1: Hang.SILENT}),
        ([sign(1, gap_s=0.1), sign(29)], {}),
    ],
)
def test_judge(signs: list[Sign], expected: dict[int, Hang]) -> None:
    """Would not catch limits that are too short for a real machine."""
    assert judge(dict(enumerate(signs)), NOW, LIMITS) == expected


def test_without_a_limit_nothing_stalls() -> None:
    """Would not catch a default that is finite somewhere else."""
    assert judge({0: sign(1, idle_s=1e9)}, NOW, HeartbeatLimits()) == {}
    assert math.isfinite(HeartbeatLimits().collective_timeout.total_seconds())


def test_a_rank_in_a_collective_waits_for_its_peers() -> None:
    """Would not catch a wait in a library that the table does not know."""
    barrier = '  File "/x/torch/distributed/distributed_c10d.py", line 1, in barrier\n    work.wait()'
    loop = '  File "/x/mine.py", line 3, in loop\n    time.sleep(1)'
    assert waits_for_peers(f"thread MainThread:\n{loop}\n{barrier}\nthread other:\n{loop}")
    assert not waits_for_peers(f"thread MainThread:\n{loop}\nthread other:\n{barrier}")
    assert not waits_for_peers("")


@pytest.fixture
def monitor() -> Iterator[HeartbeatMonitor]:
    monitor = HeartbeatMonitor("127.0.0.1", 2, HeartbeatLimits(stall_timeout_s=3, heartbeat_timeout_s=30))
    yield monitor
    monitor.close()
    monitor.close()


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_heartbeat_reports_what_its_rank_does_and_where(monitor: HeartbeatMonitor) -> None:
    """A method without progress is stalled. Would not catch a main thread that keeps the interpreter."""
    heartbeat, _ = Heartbeat(0, monitor.address), Heartbeat(1, monitor.address)
    with heartbeat.during("actor", "update"):
        wait_until(lambda: monitor.signs[0].method == "update")
        for _ in range(8):
            made_progress()
            time.sleep(0.5)
            assert monitor.hangs == {}
        wait_until(lambda: monitor.hangs == {0: Hang.STALLED})
        stacks = monitor.stacks(timeout_s=60)
        assert list(stacks) == [0, 1] and "in test_a_heartbeat_reports" in stacks[0]
        assert stacks[0].startswith("thread MainThread")
    wait_until(lambda: monitor.hangs == {})


def test_a_heartbeat_reports_how_far_its_method_is(monitor: HeartbeatMonitor) -> None:
    """What is counted inside, and nothing outside. Would not catch a count that is never raised."""
    heartbeat = Heartbeat(0, monitor.address)
    with heartbeat.during("actor", "update"), counting("micro-batches", 3):
        finished_one()
        with counting("parts", 9):
            finished_one()
        finished_one()
        wait_until(lambda: monitor.signs[0].work == WorkDone("micro-batches", 2, 3))
    wait_until(lambda: monitor.signs[0].work is None)
    finished_one()
    assert current_work() is None


def test_work_is_added_up_over_the_ranks_that_answer() -> None:
    """Two replicas of two ranks, by hand; a rank that is in another method does not count. Would not catch a method of
    a role that the pool does not have.
    """
    mark = RemoteMethod(Dispatch.REPLICAS, "gen")
    target = Target("rollout", "advance", mark, "gen")
    pool = SimpleNamespace(
        monitor=None,
        routes={Dispatch.REPLICAS: Route({rank: rank // 2 for rank in range(4)}, (0, 2))},
        all_targets={"rollout": {"advance": target}},
    )
    assert at_work(pool) == ""
    signs = {
        rank: replace(sign(1, "advance"), role="rollout", work=WorkDone("responses", rank, 8)) for rank in range(4)
    }
    pool.monitor = SimpleNamespace(signs=signs)
    assert at_work(pool) == "rollout.advance on 4 ranks, 2 of 16 responses"
    signs[2] = sign(1, "")
    assert at_work(pool) == "rollout.advance on 3 ranks, 0 of 8 responses"
    signs.update({rank: sign(1, "export") for rank in range(4)})
    assert at_work(pool) == "actor.export on 4 ranks"


def test_strangers_are_sent_away_and_change_nothing(monitor: HeartbeatMonitor) -> None:
    """A wrong token, no JSON, no end of a line, brackets without an end. Would not catch one that guesses the token."""
    failures = list[object]()
    monitor._loop.set_exception_handler(lambda _, context: failures.append(context))
    hello, deep = {"rank": 0, "token": "0" * 32}, b"[" * (LONGEST_HELLO - 1) + b"\n"
    says = (json.dumps(hello).encode() + b"\n", b"GET / HTTP/1.1\r\n", b"[1]\n", b"x" * (LONGEST_HELLO + 1))
    for said in (*says, deep, b"[" * 60_000 + b"\n", b"[" * 60_000):
        with socket.create_connection(monitor.address[:2], timeout=60) as stranger:
            stranger.sendall(said)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    assert {sign.connection for sign in monitor.signs.values()} == {Connection.AWAITED}
    assert monitor.stacks(timeout_s=0.2) == {} and not failures


def test_strangers_that_say_nothing_are_few_and_do_not_stay(
    monitor: HeartbeatMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest goes where there are too many, and all go in time; a rank comes in all the same."""
    with ExitStack() as opened:
        strangers = [
            opened.enter_context(socket.create_connection(monitor.address[:2], timeout=60))
            for _ in range(2 + MORE_STRANGERS + 5)
        ]
        wait_until(lambda: len(monitor._strangers) == 2 + MORE_STRANGERS)
        for stranger in strangers[:5]:
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        Heartbeat(0, monitor.address)
        wait_until(lambda: monitor.signs[0].connection is Connection.OPEN)
        monkeypatch.setattr(heartbeat, "HELLO_S", 0.1)
        late = opened.enter_context(socket.create_connection(monitor.address[:2], timeout=60))
        with suppress(ConnectionResetError):
            assert late.recv(1) == b""
    wait_until(lambda: not monitor._strangers)
    assert monitor.signs[0].connection is Connection.OPEN


def test_a_rank_that_was_heard_since_the_verdict_does_not_hang(monitor: HeartbeatMonitor) -> None:
    """Verdict and sentence are of one moment. Would not catch a rank that is heard after it."""
    monitor._loop.call_soon_threadsafe(lambda: monitor._signs.update({rank: Sign(-1e6) for rank in (0, 1)}))
    wait_until(lambda: monitor.hangs == {0: Hang.SILENT, 1: Hang.SILENT})
    Heartbeat(0, monitor.address)
    wait_until(lambda: monitor.signs[0].connection is Connection.OPEN)
    infos = [ProcessInfo(1, "a", "127.0.0.1"), ProcessInfo(2, "a", "127.0.0.1")]
    (failure,) = failures_of(monitor, infos, [])
    assert failure.rank == 1 and "given no sign of life for 1" in failure.message
    Heartbeat(1, monitor.address)
    wait_until(lambda: monitor.signs[1].connection is Connection.OPEN)
    assert failures_of(monitor, infos, []) == []


@pytest.mark.parametrize("late_s", [3, 60])
def test_what_the_judge_is_late_is_nobodys_silence(monitor: HeartbeatMonitor, late_s: int) -> None:
    """The monitor's own thread was not scheduled for a while. Would not catch a clock that jumps."""
    Heartbeat(0, monitor.address)
    Heartbeat(1, monitor.address)
    wait_until(lambda: all(sign.connection is Connection.OPEN for sign in monitor.signs.values()))
    before = {rank: sign.heard_at for rank, sign in monitor.signs.items()}
    done = threading.Event()

    def look() -> None:
        monitor._looked_at -= late_s + LOOK_S
        monitor._judge()
        done.set()

    monitor._loop.call_soon_threadsafe(look)
    assert done.wait(60)
    # None is as if heard in the future: a rank that was just heard is late by less.
    assert all(monitor.signs[rank].heard_at > before[rank] for rank in before) and monitor.hangs == {}
    assert all(sign.heard_at <= time.monotonic() for sign in monitor.signs.values())


def test_silence_counts_from_the_looks_that_came_in_time() -> None:
    """By hand: heard 25 s ago, of which the judge was late 10. Would not catch a rank that speaks meanwhile."""
    assert excused({0: sign(25), 1: sign(4)}, 10, NOW) == {0: sign(15), 1: sign(0)}
    assert excused({0: sign(25)}, 0.01, NOW) == {0: sign(25)}
