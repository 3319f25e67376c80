"""Calls of a group's ranks that are under way: sent to each rank or through one rank of each node, waited for, failed.

The driver spends some 0.3 ms on every message and its answer. In a large world it therefore calls one rank of each
node, which calls the others of its node. What such a rank's peers fail with reaches the driver through the heartbeat,
because the rank itself may be waiting for them in a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from megatron_rl.cluster.call_arguments import Message
from megatron_rl.cluster.failures import RankFailure
from megatron_rl.cluster.heartbeat_monitor import Connection, HeartbeatMonitor
from megatron_rl.cluster.hung_report import failures_of
from megatron_rl.cluster.worker_process import Call, ProcessInfo, read_failure

LOOK_S = 1.0
"""Between two looks at the heartbeat while a call is waited for."""


class CallsFailed(Exception):
    """At least one rank has failed; `failures` are all that were reported within the grace."""

    def __init__(self, failures: Sequence[RankFailure]) -> None:
        super().__init__(f"{len(failures)} rank(s) failed")
        self.failures = list(failures)


class RankCalls:
    """The ranks behind `handles`, in rank order, and every call of them that nobody has waited for yet.

    node_size: ranks that are called through the first of them, in rank order; 1: each rank is called by the driver.
    grace_s: seconds in which peers of a failed rank may report what they saw.
    """

    def __init__(
        self,
        handles: Sequence[ActorHandle],
        processes: Sequence[ProcessInfo],
        watch: HeartbeatMonitor,
        node_size: int,
        grace_s: float,
    ) -> None:
        self._handles = handles
        self._processes = processes
        self._watch = watch
        self._node_size = node_size
        self._grace_s = grace_s
        self._open: dict[ObjectRef, tuple[Call, ...]] = {}
        if node_size > 1:
            nodes = [handles[first : first + node_size] for first in range(0, len(handles), node_size)]
            ray.get([leader.meet.remote(peers) for leader, *peers in nodes])

    def construct(self, role: str, env: Sequence[dict[str, str]], *arguments: Any) -> list[ObjectRef]:
        """Have all ranks build their workers, each with its own variables in the environment."""
        ranks = zip(self._handles, env, strict=True)
        answers = [handle.construct.remote(role, variables, *arguments) for handle, variables in ranks]
        self._open |= {answer: (Call(rank, role, "__init__"),) for rank, answer in enumerate(answers)}
        return answers

    def send(self, role: str, method: str, ray_method: str, messages: Mapping[int, Message]) -> list[ObjectRef]:
        """Have the ranks run a method on their messages; every rank, or rank 0 alone. Returns what `wait` takes.

        ray_method: the method's Ray ray_method.
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
        """Wait for whatever is under way. Raises CallsFailed."""
        self.wait("the calls still running", list(self._open), None, look)

    def wait(
        self, what: str, answers: Sequence[ObjectRef], timeout: float | None, look: Callable[[], None]
    ) -> list[Any]:
        """The ranks' answers, in rank order. Raises CallsFailed, also for another call that is still open.

        look: called every LOOK_S to raise for whatever else has failed. Raises TimeoutError after `timeout` seconds;
        the call goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))
            try:
                got = ray.get(list(answers), timeout=left)  # raises as soon as one of them has failed
            except GetTimeoutError:
                self._look_at_watch()
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
                return [one for value, ranks in pairs for one in (value if len(ranks) > 1 else [value])]

    def raise_if_failed(self) -> None:
        """Raise CallsFailed for what went wrong in calls that are open and that nobody may ever wait for."""
        self._look_at_watch()
        if self._open and self._answered_failures(timeout=0):
            raise CallsFailed(self.failures(self._grace_s))

    def _look_at_watch(self) -> None:
        if self._watch.failures or self._dead_processes(self._grace_s):
            raise CallsFailed(self.failures(self._grace_s))
        if trouble := dict(self._watch.trouble):
            calls = [call for answer in self._running() for call in self._open[answer]]
            raise CallsFailed(failures_of(trouble, self._watch, self._processes, calls))

    def failures(self, grace_s: float) -> list[RankFailure]:
        """What all ranks failed with until `grace_s` seconds from now, one of each.

        By their answers, by the heartbeat, by a process that is gone.
        """
        relayed = {call.rank for calls in self._open.values() for call in calls[1:]}
        deadline = time.monotonic() + grace_s
        found = self._answered_failures(grace_s)
        while relayed - {failure.rank for failure in self._watch.failures} and time.monotonic() < deadline:
            time.sleep(0.05)
        found += self._dead_processes(grace_s)
        ranks = {failure.rank for failure in found}
        return found + [failure for failure in self._watch.failures if failure.rank not in ranks]

    def _dead_processes(self, timeout: float) -> list[RankFailure]:
        """Of ranks that another one calls and whose connection broke: Ray says at once if their process is gone."""
        calls = {call.rank: call for calls in self._open.values() for call in calls[1:]}
        broken = [rank for rank, sign in self._watch.signs.items() if sign.connection is Connection.BROKEN]
        probes = {self._handles[rank].describe_process.remote(): calls[rank] for rank in broken if rank in calls}
        if not probes:
            return []
        answered, _ = ray.wait(list(probes), num_returns=len(probes), timeout=timeout, fetch_local=False)
        return self._read(answered, {probe: (call,) for probe, call in probes.items()})

    def _running(self) -> list[ObjectRef]:
        """Open calls without an answer."""
        if not self._open:
            return []
        running: list[ObjectRef]
        _, running = ray.wait(list(self._open), num_returns=len(self._open), timeout=0, fetch_local=False)
        return running

    def _answered_failures(self, timeout: float) -> list[RankFailure]:
        """Failures among the open answers that are there after `timeout`, or as soon as all are."""
        if not self._open:
            return []
        ready, _ = ray.wait(list(self._open), num_returns=len(self._open), timeout=timeout, fetch_local=False)
        return self._read(ready, self._open)

    def _read(self, answers: Sequence[ObjectRef], calls: Mapping[ObjectRef, tuple[Call, ...]]) -> list[RankFailure]:
        first = {answer: calls[answer][0] for answer in answers}
        read = [read_failure(answer, call, self._processes[call.rank].where) for answer, call in first.items()]
        return [failure for failure in read if failure is not None]
