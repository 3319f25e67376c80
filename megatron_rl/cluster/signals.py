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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from megatron_rl.cluster.last_resort import CLEANUP_S, LastResort
from megatron_rl.errors import GraceOver, MegatronRLError

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end, beside Ctrl-C."""
_Handler = Callable[[int, FrameType | None], Any] | int | None
"""What `signal.getsignal` returns."""

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
    after a line on stderr. Otherwise the first of them is noted in the request that is yielded, a second SIGTERM or
    SIGINT raises these, and so many seconds after the first the block is left with GraceOver. Further SIGTERMs are
    ignored: they would interrupt the cleaning up that the earlier one asked for. A SIGHUP that `nohup` ignores stays
    ignored, and so does, where nothing is saved, a SIGINT that a shell has ignored in its background.

    Where the block is not left CLEANUP_S after it should be, because its main thread hangs in a library, the process
    ends all the same, with the code it would have had.
    """
    request = StopRequest(LastResort())
    signals = {*_heeded(ENDING), *(_heeded((signal.SIGINT,)) if grace_s is None else (signal.SIGINT, signal.SIGALRM))}
    previous = {number: signal.getsignal(number) for number in signals}
    reason: BaseException | None = None

    def leave(error: BaseException) -> NoReturn:
        nonlocal reason
        reason = error
        request.last_resort.arm(CLEANUP_S, exit_code_of(error))
        if grace_s is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if signal.SIGINT in previous:
            signal.signal(signal.SIGINT, previous[signal.SIGINT])
        _ignore_ending()
        # Ray lets these two alone out of its calls, SystemExit with another code; what was meant is in `reason`.
        raise error if isinstance(error, KeyboardInterrupt | SystemExit) else SystemExit

    def receive(number: int, frame: object) -> None:
        if grace_s is None:
            _say(f"{signal.Signals(number).name}: the run ends at once, as it saves no checkpoints (trainer.save_freq)")
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


class _Quit:
    """A handler that ends this process. previous: the one in whose place it is. code: None: 128 + signal."""

    def __init__(self, previous: _Handler, code: int | None) -> None:
        self.previous, self._code = previous, code

    def __call__(self, number: int, frame: object) -> None:
        name = signal.Signals(number).name
        _say(f"{name}: stopped while the command was starting; no process was started, and nothing was written")
        os._exit(128 + number if self._code is None else self._code)


def quit_on_signals(code: int | None = None) -> None:
    """Until `restore_signals`, SIGTERM, Ctrl-C and SIGHUP print one line and end this process; ignored ones do not.

    For the time in which libraries are imported, which may catch any exception, and nothing has to be cleaned up.
    code: what to exit with, for a later call to change; None: 128 + signal.
    """
    for number in _heeded((*ENDING, signal.SIGINT)):
        present = signal.getsignal(number)
        signal.signal(number, _Quit(present.previous if isinstance(present, _Quit) else present, code))


def restore_signals() -> None:
    """Undo `quit_on_signals`; do nothing where it was not called."""
    for number in (*ENDING, signal.SIGINT):
        present = signal.getsignal(number)
        if isinstance(present, _Quit):
            signal.signal(number, present.previous)


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

    for number in _heeded(ENDING):
        signal.signal(number, leave)


def _heeded(numbers: Iterable[signal.Signals]) -> tuple[signal.Signals, ...]:
    """Return the signals that this process does not ignore; under `nohup` it ignores SIGHUP."""
    return tuple(number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN)


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
