"""Send calls to a pool's ranks, wait for their answers, and report the ranks that failed or hang.

The driver spends some 0.3 ms on every message and its answer. In a large world it therefore calls one rank of each
node, which calls the other ranks of its node. The heartbeat reports failures of those ranks, because the rank that
calls them may wait for them in a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from megatron_rl.cluster.call_arguments import Message
from megatron_rl.cluster.failures import RankFailure
from megatron_rl.cluster.heartbeat_monitor import Connection, Hang, HeartbeatLimits, HeartbeatMonitor, waits_for_peers
from megatron_rl.cluster.worker_process import Call, ProcessInfo, read_failure
from megatron_rl.errors import WorkerStall

LOOK_S = 1.0
"""Seconds between two looks at the heartbeat while a call is waited for."""

STACKS_TIMEOUT_S = 5.0
"""A rank that answers at all does so within INTERVAL_S; reading the stacks of many ranks takes a moment."""


class CallsFailed(Exception):
    """At least one rank has failed; `failures` are those that were reported within the grace."""

    def __init__(self, failures: Sequence[RankFailure]) -> None:
        super().__init__(f"{len(failures)} rank(s) failed")
        self.failures = list(failures)


class RankCalls:
    """Calls the ranks behind `handles`, in rank order, and keeps every call that has not been waited for.

    node_size: consecutive ranks that the driver calls through the first of them; 1: the driver calls each rank.
    grace_s: seconds in which the peers of a failed rank may report their own failures.
    """

    def __init__(
        self,
        handles: Sequence[ActorHandle],
        processes: Sequence[ProcessInfo],
        monitor: HeartbeatMonitor,
        node_size: int,
        grace_s: float,
    ) -> None:
        self._handles = handles
        self._processes = processes
        self._monitor = monitor
        self._node_size = node_size
        self._grace_s = grace_s
        self._open: dict[ObjectRef, tuple[Call, ...]] = {}
        if node_size > 1:
            nodes = [handles[first : first + node_size] for first in range(0, len(handles), node_size)]
            ray.get([leader.meet.remote(peers) for leader, *peers in nodes])

    def construct(self, role: str, env: Sequence[dict[str, str]], *arguments: Any) -> list[ObjectRef]:
        """Have all ranks construct their hosts, each with its own environment variables."""
        ranks = zip(self._handles, env, strict=True)
        answers = [handle.construct.remote(role, variables, *arguments) for handle, variables in ranks]
        self._open |= {answer: (Call(rank, role, "__init__"),) for rank, answer in enumerate(answers)}
        return answers

    def send(self, role: str, method: str, ray_method: str, messages: Mapping[int, Message]) -> list[ObjectRef]:
        """Have every rank, or rank 0 alone, run a method on its message. Returns the answers for `wait`.

        ray_method: the name of the method on the Ray actor.
        """
        size = self._node_size if len(messages) > 1 else 1
        answers = []
        for first in range(0, len(messages), size):
            ranks = range(first, first + size)
            if size == 1:
                answer = getattr(self._handles[first], ray_method).remote(*messages[first])
            else:
                answer = self._handles[first].relay.remote(role, method, ray_method, [messages[rank] for rank in ranks])
            self._open[answer] = tuple(Call(rank, role, method) for rank in ranks)
            answers.append(answer)
        return answers

    def wait_for_all(self, look: Callable[[], None]) -> None:
        """Wait for all open calls. Raises CallsFailed."""
        self.wait("the calls still running", list(self._open), None, look)

    def wait(
        self, what: str, answers: Sequence[ObjectRef], timeout: float | None, look: Callable[[], None]
    ) -> list[Any]:
        """Return the ranks' answers, in rank order. Raises CallsFailed, also for another call that is still open.

        look: called every LOOK_S; raises for failures elsewhere. Raises TimeoutError after `timeout` seconds; the call
        continues.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))
            try:
                got = ray.get(list(answers), timeout=left)  # raises as soon as one of them has failed
            except GetTimeoutError:
                self._raise_for_heartbeats()
                look()
                if deadline is not None and time.monotonic() >= deadline:
                    _, missing = ray.wait(list(answers), num_returns=len(answers), timeout=0)
                    ranks = sorted(call.rank for answer in missing for call in self._open[answer])
                    raise TimeoutError(f"{what}: no report from ranks {ranks} in {timeout:g} s") from None
            except RayError:
                raise CallsFailed(self.failures(self._grace_s)) from None
            else:
                calls = [self._open.pop(answer, ()) for answer in answers]
                pairs = zip(got, calls, strict=True)
                return [answer for value, ranks in pairs for answer in (value if len(ranks) > 1 else [value])]

    def raise_if_failed(self) -> None:
        """Raise CallsFailed for failures in open calls, which may never be waited for."""
        self._raise_for_heartbeats()
        if self._open and self._answered_failures(timeout=0):
            raise CallsFailed(self.failures(self._grace_s))

    def _raise_for_heartbeats(self) -> None:
        if self._monitor.failures or self._dead_processes(self._grace_s):
            raise CallsFailed(self.failures(self._grace_s))
        if hangs := dict(self._monitor.hangs):
            calls = [call for answer in self._running() for call in self._open[answer]]
            raise CallsFailed(failures_of(hangs, self._monitor, self._processes, calls))

    def failures(self, grace_s: float) -> list[RankFailure]:
        """Return the failures of all ranks until `grace_s` seconds from now, one for each rank.

        They come from the ranks' answers, from the heartbeat, and from processes that are gone.
        """
        relayed = {call.rank for calls in self._open.values() for call in calls[1:]}
        deadline = time.monotonic() + grace_s
        failures = self._answered_failures(grace_s)
        while relayed - {failure.rank for failure in self._monitor.failures} and time.monotonic() < deadline:
            time.sleep(0.05)
        failures += self._dead_processes(grace_s)
        ranks = {failure.rank for failure in failures}
        return failures + [failure for failure in self._monitor.failures if failure.rank not in ranks]

    def _dead_processes(self, timeout: float) -> list[RankFailure]:
        """Ask Ray for ranks that another rank calls and whose connection broke; return those whose process is gone."""
        calls = {call.rank: call for calls in self._open.values() for call in calls[1:]}
        broken = [rank for rank, sign in self._monitor.signs.items() if sign.connection is Connection.BROKEN]
        probes = {self._handles[rank].describe_process.remote(): calls[rank] for rank in broken if rank in calls}
        if not probes:
            return []
        answered, _ = ray.wait(list(probes), num_returns=len(probes), timeout=timeout, fetch_local=False)
        return self._read(answered, {probe: (call,) for probe, call in probes.items()})

    def _running(self) -> list[ObjectRef]:
        """Return the open calls without an answer."""
        if not self._open:
            return []
        running: list[ObjectRef]
        _, running = ray.wait(list(self._open), num_returns=len(self._open), timeout=0, fetch_local=False)
        return running

    def _answered_failures(self, timeout: float) -> list[RankFailure]:
        """Return the failures among the answers that are ready after `timeout`, or as soon as all are ready."""
        if not self._open:
            return []
        ready, _ = ray.wait(list(self._open), num_returns=len(self._open), timeout=timeout, fetch_local=False)
        return self._read(ready, self._open)

    def _read(self, answers: Sequence[ObjectRef], calls: Mapping[ObjectRef, tuple[Call, ...]]) -> list[RankFailure]:
        first = {answer: calls[answer][0] for answer in answers}
        read = [read_failure(answer, call, self._processes[call.rank].where) for answer, call in first.items()]
        return [failure for failure in read if failure is not None]


def failures_of(
    hangs: Mapping[int, Hang], monitor: HeartbeatMonitor, processes: Sequence[ProcessInfo], running: Sequence[Call]
) -> list[RankFailure]:
    """Return one failure for each rank in `hangs`; the rank to look at first has the earliest date.

    Asks all ranks for their stacks and writes them to `limits.stacks_file`. running: calls without an answer, in the
    order they were made.
    """
    stacks = monitor.stacks(STACKS_TIMEOUT_S)
    where = _write(stacks, monitor.limits)
    # The first call that a rank has not answered is the method it is in: the last sign of a silent rank is older.
    calls = {call.rank: call for call in reversed(running)}
    signs, now = monitor.signs, time.monotonic()
    failures: list[RankFailure] = []
    for rank in sorted(hangs, key=lambda rank: (waits_for_peers(stacks.get(rank, "")), -signs[rank].idle_s)):
        sign, process = signs[rank], processes[rank]
        call = calls.get(rank, Call(rank, "worker", "no method"))
        message = _message(hangs[rank], process, sign.idle_s, now - sign.heard_at, monitor.limits)
        failures.append(
            RankFailure(
                *call,
                error_type=hangs[rank].name,
                message=message + where,
                traceback=stacks.get(rank, "it did not say where it is"),
                wall_time=float(len(failures)),
                error_class=WorkerStall,
            )
        )
    return failures


def _message(hang: Hang, process: ProcessInfo, idle_s: float, silence_s: float, limits: HeartbeatLimits) -> str:
    who = process.where
    match hang:
        case Hang.GONE:
            return f"{who} closed its connection {silence_s:.0f} s ago and did not come back: it or its node is gone"
        case Hang.SILENT:
            return f"{who} has given no sign of life for {silence_s:.0f} s{_state(process)}"
        case Hang.STALLED:
            return (
                f"{who} has made no progress for {idle_s + silence_s:.0f} s "
                f"(trainer.stall_timeout_s={limits.stall_timeout_s:g})"
            )


def _state(process: ProcessInfo) -> str:
    """Explain the silence of a process: it was stopped, or, as for all processes of other nodes, the likely causes."""
    with suppress(psutil.Error):
        if process.is_local and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
            return "; it was stopped by a signal (SIGSTOP or a debugger)"
    return "; it may be stopped or swapped out, or its node may be unreachable"


def _write(stacks: Mapping[int, str], limits: HeartbeatLimits) -> str:
    """Write the stacks of all ranks into a file; return the addition to the message that names it."""
    if limits.stacks_file is None or not stacks:
        return ""
    text = "\n\n".join(f"rank {rank}\n{stack}" for rank, stack in stacks.items())
    with suppress(OSError):
        limits.stacks_file.write_text(text + "\n")
        return f"; stacks of ranks {', '.join(map(str, stacks))}: {limits.stacks_file}"
    return ""
