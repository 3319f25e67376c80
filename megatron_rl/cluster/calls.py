"""Send calls to a pool's ranks, wait for their replies, and report the ranks that failed or hang."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import psutil

from megatron_rl.cluster.failures import RankFailure, root_cause
from megatron_rl.cluster.heartbeat import Hang, HeartbeatLimits, HeartbeatMonitor, waits_for_peers
from megatron_rl.cluster.launcher import ProcessInfo, RankProcess, send_together
from megatron_rl.cluster.rank_messages import ProcessDied, RankFailed
from megatron_rl.errors import WorkerStall
from megatron_rl.observe.appended_file import replace_file

LOOK_S = 1.0
"""Seconds between two looks at the heartbeat while a call is waited for."""

CAUSE_S, CAUSE_LOOK_S = 10.0, 0.1
"""Seconds to wait for the failure of a rank whose peers have already lost it, as Ray may notice a lost node late; and
seconds between two looks.
"""

STACKS_TIMEOUT_S = 5.0
"""A rank that replies at all does so within INTERVAL_S; reading the stacks of many ranks takes a moment."""


class Call(NamedTuple):
    """A call of a method on one rank."""

    rank: int
    role: str
    method: str


class CallsFailed(Exception):
    """At least one rank has failed; `failures` are those that were reported within the grace."""

    def __init__(self, failures: Sequence[RankFailure]) -> None:
        super().__init__(f"{len(failures)} rank(s) failed")
        self.failures = list(failures)


class RankCalls:
    """Calls the ranks of `processes`, in rank order, and keeps every call that has not been waited for.

    infos: where they run. grace_s: seconds in which the peers of a failed rank may report their own failures.
    """

    def __init__(
        self,
        processes: Sequence[RankProcess],
        infos: Sequence[ProcessInfo],
        monitor: HeartbeatMonitor,
        grace_s: float,
    ) -> None:
        self._processes = processes
        self._infos = infos
        self._monitor = monitor
        self._grace_s = grace_s
        self._open: dict[Future[Any], Call] = {}

    def send(self, role: str, method: str, messages: Mapping[int, Any]) -> list[Future[Any]]:
        """Send ranks their messages, each of which has them run a method. Returns the answers for `wait`."""
        answers = send_together([(self._processes[rank], message) for rank, message in messages.items()])
        self._open |= {answer: Call(rank, role, method) for answer, rank in zip(answers, messages, strict=True)}
        return answers

    def wait_for_all(self, look: Callable[[], None]) -> None:
        """Wait for all open calls. Raises CallsFailed."""
        self.wait("the calls still running", list(self._open), None, look)

    def wait(
        self, what: str, answers: Sequence[Future[Any]], timeout: float | None, look: Callable[[], None]
    ) -> list[Any]:
        """Return the ranks' replies, in their order. Raises CallsFailed, also for another call that is still open.

        look: called every LOOK_S; raises for failures elsewhere. Raises TimeoutError after `timeout` seconds; the call
        continues.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))
            done, missing = wait(answers, left, FIRST_EXCEPTION)
            if any(answer.exception() is not None for answer in done):
                raise CallsFailed(self._failures_and_cause())
            if not missing:
                for answer in answers:
                    self._open.pop(answer, None)
                return [answer.result() for answer in answers]
            self._raise_for_heartbeats()
            look()
            if deadline is not None and time.monotonic() >= deadline:
                ranks = sorted(self._open[answer].rank for answer in missing)
                raise TimeoutError(f"{what}: no report from ranks {ranks} in {timeout:g} s")

    def raise_if_failed(self) -> None:
        """Raise CallsFailed for failures in open calls, which may never be waited for, and for ended processes."""
        self._raise_for_heartbeats()
        if self.failures_so_far():
            raise CallsFailed(self._failures_and_cause())

    def _raise_for_heartbeats(self) -> None:
        if not self._monitor.hangs:
            return
        running = [call for answer, call in self._open.items() if not answer.done()]
        if failures := failures_of(self._monitor, self._infos, running):
            raise CallsFailed(failures)

    def _failures_and_cause(self) -> list[RankFailure]:
        """Wait for all ranks to report. Where all reports are of a lost peer, wait longer for the lost rank's own."""
        wait(self._open, self._grace_s)
        deadline = time.monotonic() + CAUSE_S
        while True:
            failures = self.failures_so_far()
            all_reported = len(failures) == len(self._processes)
            if all_reported or not root_cause(failures).looks_secondary or time.monotonic() > deadline:
                return failures
            time.sleep(CAUSE_LOOK_S)

    def failures_so_far(self) -> list[RankFailure]:
        """Return one failure for each rank that has failed."""
        failures: dict[int, RankFailure] = {}
        first_of_rank: dict[int, Call] = {}
        for answer, call in self._open.items():
            first_of_rank.setdefault(call.rank, call)
            error = answer.exception() if answer.done() else None
            if error is not None and call.rank not in failures:
                failures[call.rank] = failure_of(error, call, self._infos[call.rank])
        for rank, process in enumerate(self._processes):
            if process.ended.done() and rank not in failures:
                call = first_of_rank.get(rank, Call(rank, "host", ""))
                failures[rank] = failure_of(ProcessDied(process.ended.result()), call, self._infos[rank])
        return list(failures.values())


def failure_of(error: BaseException, call: Call, process: ProcessInfo) -> RankFailure:
    """Describe the failure of a call, also where the process has died and can no longer report it."""
    if isinstance(error, RankFailed):
        return replace(error.failure, node=process.node_id, host=process.host, gpu=process.gpus)
    died = isinstance(error, ProcessDied)
    return RankFailure(
        *call,
        error_type=type(error).__name__,
        message=f"It was {process.where}; {error}" if died else str(error),
        traceback="" if died else "".join(traceback.format_exception(error)),
        wall_time=time.time(),
        died=died,
    )


def failures_of(
    monitor: HeartbeatMonitor, processes: Sequence[ProcessInfo], running: Sequence[Call]
) -> list[RankFailure]:
    """Return one failure for each rank that hangs; the rank to look at first has the earliest date.

    Asks all ranks for their stacks, then judges again: a rank that was heard meanwhile does not hang, and none may be
    left. Writes the stacks to `limits.stacks_file`. running: calls without a reply, in the order they were made.
    """
    stacks = monitor.stacks(STACKS_TIMEOUT_S)
    verdict = monitor.verdict()
    if not verdict.hangs:
        return []
    where = _write(stacks, monitor.limits)
    # The first call that a rank has not answered is the method it is in: the last sign of a silent rank is older.
    calls = {call.rank: call for call in reversed(running)}
    hangs, signs = verdict.hangs, verdict.signs
    failures: list[RankFailure] = []
    for rank in sorted(hangs, key=lambda rank: (waits_for_peers(stacks.get(rank, "")), -signs[rank].idle_s)):
        sign, process = signs[rank], processes[rank]
        call = calls.get(rank, Call(rank, "worker", "no method"))
        message = _message(hangs[rank], process, sign.idle_s, verdict.at - sign.heard_at, monitor.limits)
        failures.append(
            RankFailure(
                *call,
                error_type=hangs[rank].name,
                message=message + where,
                traceback=stacks.get(rank, "it did not report its progress"),
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
        replace_file(limits.stacks_file, text.encode(errors="replace") + b"\n")
        return f"; stacks of ranks {', '.join(map(str, stacks))}: {limits.stacks_file}"
    return ""
