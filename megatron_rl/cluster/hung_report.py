"""What the user reads when a rank stopped answering or getting on: where it is, what it was doing, all stacks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from megatron_rl.cluster.failures import RankFailure
from megatron_rl.cluster.heartbeat_monitor import Hang, HeartbeatLimits, HeartbeatMonitor, waits_for_peers
from megatron_rl.cluster.worker_process import Call, ProcessInfo
from megatron_rl.errors import WorkerStall

STACKS_TIMEOUT_S = 5.0
"""A rank that answers at all does so within INTERVAL_S; the lines of many ranks take a moment to read."""


def failures_of(
    trouble: Mapping[int, Hang], watch: HeartbeatMonitor, processes: Sequence[ProcessInfo], running: Sequence[Call]
) -> list[RankFailure]:
    """One failure for each rank in `trouble`, the one to look at first dated first.

    Asks all ranks for their stacks and writes them to `limits.stacks_file`. running: calls without an answer, in the
    order they were made.
    """
    stacks = watch.stacks(STACKS_TIMEOUT_S)
    where = _write(stacks, watch.limits)
    # The first call that a rank has not answered is the method it is in: the last sign of a silent one is older.
    calls = {call.rank: call for call in reversed(running)}
    signs, now = watch.signs, time.monotonic()
    failures: list[RankFailure] = []
    for rank in sorted(trouble, key=lambda rank: (waits_for_peers(stacks.get(rank, "")), -signs[rank].idle_s)):
        sign, process = signs[rank], processes[rank]
        call = calls.get(rank, Call(rank, "worker", "no method"))
        message = _message(trouble[rank], process, sign.idle_s, now - sign.heard_at, watch.limits)
        failures.append(
            RankFailure(
                *call,
                error_type=trouble[rank].name,
                message=message + where,
                traceback=stacks.get(rank, "it did not say where it is"),
                wall_time=float(len(failures)),
                error_class=WorkerStall,
            )
        )
    return failures


def _message(trouble: Hang, process: ProcessInfo, idle_s: float, silence_s: float, limits: HeartbeatLimits) -> str:
    who = process.where
    match trouble:
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
    """What the system says of a process of this node; of other nodes nothing."""
    with suppress(psutil.Error):
        if process.is_local and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
            return "; it was stopped by a signal (SIGSTOP or a debugger)"
    return "; it may be stopped or swapped out, or its node may be unreachable"


def _write(stacks: Mapping[int, str], limits: HeartbeatLimits) -> str:
    """The stacks of all ranks into a file; what to add to the message."""
    if limits.stacks_file is None or not stacks:
        return ""
    text = "\n\n".join(f"rank {rank}\n{stack}" for rank, stack in stacks.items())
    with suppress(OSError):
        limits.stacks_file.write_text(text + "\n")
        return f"; stacks of ranks {', '.join(map(str, stacks))}: {limits.stacks_file}"
    return ""
