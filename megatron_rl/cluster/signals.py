"""SIGTERM, Ctrl-C and SIGHUP in the driver: a request to stop where the run can save, else an ordinary exit.

Either way `with` blocks close what they opened. Signals reach the main thread only, between two of its instructions
and also while it waits in a Ray call.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

from megatron_rl.cluster.last_resort import CLEANUP_S, LastResort
from megatron_rl.errors import GraceOver, MegatronRLError

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end, beside Ctrl-C."""
STDERR = 2
SHORTEST_TIMER_S = 1e-6
"""A timer of 0 s would never ring."""


@dataclass
class StopRequest:
    """Whether a signal has asked the run to stop, which one, and when it must have ended.

    deadline: of `time.monotonic()`, infinite before the signal.
    """

    last_resort: LastResort
    signal: signal.Signals | None = None
    deadline: float = math.inf

    @property
    def is_set(self) -> bool:
        """Whether the run is to stop."""
        return self.signal is not None

    def remaining_s(self) -> float:
        """Seconds until the deadline, never below 0."""
        return max(0.0, self.deadline - time.monotonic())

    def fulfil(self, exit_code: int) -> None:
        """All is saved: neither the deadline nor a further signal of `ENDING` may interrupt the cleaning up.

        exit_code: of a process that does not get through with it.
        """
        self.last_resort.arm(CLEANUP_S, exit_code)
        _ignore_ending()
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def graceful_signals(grace_s: float | None = None) -> Iterator[StopRequest]:
    """What SIGTERM, SIGHUP and SIGINT do inside this block; the main thread must enter it, outside every other block.

    grace_s: None: the first SIGTERM raises `SystemExit(143)`, SIGHUP `SystemExit(129)`, and SIGINT KeyboardInterrupt,
    as always in Python. Otherwise the first of them is noted in the request that is yielded, a second SIGTERM or SIGINT
    raises these, and so many seconds after the first the block is left with GraceOver. Further SIGTERMs are ignored:
    they would interrupt the cleaning up that the earlier one asked for. A SIGHUP that `nohup` ignores stays ignored.

    Where the block is not left CLEANUP_S after it should be, because its main thread hangs in a library, the process
    ends all the same, with the code it would have had.
    """
    request = StopRequest(LastResort())
    signals = _ending_signals() if grace_s is None else (*_ending_signals(), signal.SIGINT, signal.SIGALRM)
    previous = {number: signal.getsignal(number) for number in signals}
    reason: BaseException | None = None

    def leave(error: BaseException) -> NoReturn:
        nonlocal reason
        reason = error
        request.last_resort.arm(CLEANUP_S, exit_code_of(error))
        if grace_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGINT, previous[signal.SIGINT])
        _ignore_ending()
        # Ray lets these two alone out of its calls, SystemExit with another code; what was meant is in `reason`.
        raise error if isinstance(error, KeyboardInterrupt | SystemExit) else SystemExit

    def receive(number: int, frame: object) -> None:
        if grace_s is None:
            leave(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        first = not request.is_set
        if not first and number == signal.SIGHUP:
            return  # a closing terminal signals twice, by the system and by the shell
        if not first and request.signal is not signal.SIGHUP:  # a closing login adds a SIGTERM: no second wish either
            leave(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        request.signal = signal.Signals(number)
        if first:
            request.deadline = time.monotonic() + grace_s
            request.last_resort.arm(grace_s + CLEANUP_S, GraceOver.exit_code)
            signal.setitimer(signal.ITIMER_REAL, max(grace_s, SHORTEST_TIMER_S))
        second = "" if number == signal.SIGHUP else "; a second signal ends it at once"
        _say(f"{request.signal.name}: the run saves and stops within {grace_s:g} s (trainer.stop_grace_s){second}")

    def ring(number: int, frame: object) -> None:
        sent = "the signal" if request.signal is None else request.signal.name
        leave(
            GraceOver(
                f"the run could not save within trainer.stop_grace_s={grace_s:g} s of {sent}; the last "
                "complete checkpoint stands; nearest: more seconds than saving, and giving up a step, take"
            )
        )

    for number in signals:
        signal.signal(number, ring if number == signal.SIGALRM else receive)
    try:
        yield request
    except (KeyboardInterrupt, SystemExit):
        if reason is not None:
            raise reason from None
        raise
    finally:
        request.last_resort.stand_down()
        if grace_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def exit_code_of(error: BaseException) -> int:
    """What a process ends with that this exception ends."""
    match error:
        case MegatronRLError():
            return error.exit_code
        case SystemExit(code=int(code)):
            return code
        case KeyboardInterrupt():
            return 128 + signal.SIGINT
    return MegatronRLError.exit_code


def exit_on_signals() -> None:
    """Make SIGTERM, and SIGHUP unless it is ignored, raise `SystemExit(128 + signal)`: for programs that only wait."""

    def leave(number: int, frame: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closing terminal signals twice
        sys.exit(128 + number)

    for number in _ending_signals():
        signal.signal(number, leave)


def _ending_signals() -> tuple[signal.Signals, ...]:
    """Those of `ENDING` that this process listens to: `nohup` has SIGHUP ignored."""
    return tuple(
        number for number in ENDING if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    )


def _ignore_ending() -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def _say(text: str) -> None:
    """One line on stderr, if it is open; written past Python's buffers, in whose middle the signal may have come."""
    with suppress(OSError):
        os.write(STDERR, f"\n{text}\n".encode())


@contextmanager
def keeping_sigterm_handler() -> Iterator[None]:
    """Put the SIGTERM handler back that was there before this block, because `ray.init` installs its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
