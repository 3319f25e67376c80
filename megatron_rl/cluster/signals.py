"""SIGTERM, Ctrl-C and SIGHUP in the driver: a request to stop where the run can save, else an ordinary exit.

In both cases `with` blocks close their resources. Only the main thread handles signals, between two instructions and
also while it waits in a Ray call.
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

from megatron_rl.errors import GracePeriodExpired, MegatronRLError

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals, other than Ctrl-C's, that ask a process to end."""
_Handler = Callable[[int, FrameType | None], Any] | int | None
"""The values of `signal.getsignal`."""

STDERR = 2
SHORTEST_TIMER_S = 1e-6
"""A timer of 0 s would never ring."""

CLEANUP_S = 45.0
"""Seconds to end Ray and the ranks, which normally takes a few."""

_LOOK_S = 0.5


class LastResort:
    """A thread that, once armed, ends this process at a deadline even if its main thread hangs in a library.

    Then the supervisor kills the processes that the driver leaves. A signal handler may call both
    methods: they only set attributes.
    """

    def __init__(self) -> None:
        self._deadline, self._exit_code = math.inf, 0
        self._is_over = False
        threading.Thread(target=self._run, name="last resort", daemon=True).start()

    def arm(self, seconds: float, exit_code: int) -> None:
        """End the process with this code after that many seconds; the latest call counts."""
        self._deadline, self._exit_code = time.monotonic() + seconds, exit_code

    def stand_down(self) -> None:
        """Never end the process."""
        self._is_over = True

    def _run(self) -> None:
        # The system could give this thread a signal that arrives while the main thread handles another, and then the
        # main thread would not wake.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._is_over:
            time.sleep(_LOOK_S)
            if not self._is_over and time.monotonic() > self._deadline:
                _say(f"cleaning up did not end within {CLEANUP_S:g} s; the run ends now")
                os._exit(self._exit_code)


@dataclass
class StopRequest:
    """The signal that has asked the run to stop, if any, and the time by which the run must have ended.

    deadline: in `time.monotonic()`, infinite before the signal. own_reason: why the run itself asks for its stop.
    """

    last_resort: LastResort
    signal: signal.Signals | None = None
    deadline: float = math.inf
    own_reason: str = ""

    @property
    def is_set(self) -> bool:
        """Whether the run is to stop."""
        return self.signal is not None or self.own_reason != ""

    def ask(self, reason: str) -> None:
        """Have the run save what it has, without another step, and stop."""
        self.own_reason, self.deadline = reason, time.monotonic()

    def remaining_s(self) -> float:
        """Seconds until the deadline, never below 0."""
        return max(0.0, self.deadline - time.monotonic())

    def fulfil(self, exit_code: int) -> None:
        """Everything is saved: from here neither the deadline nor a signal of `ENDING` interrupts the clean-up.

        exit_code: of the process if the clean-up hangs.
        """
        self.last_resort.arm(CLEANUP_S, exit_code)
        _ignore_ending()
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def graceful_signals(grace_s: float | None = None) -> Iterator[StopRequest]:
    """Handle SIGTERM, SIGHUP and SIGINT inside this block; the main thread must enter it, outside every other block.

    grace_s=None: the first SIGTERM raises `SystemExit(143)`, SIGHUP `SystemExit(129)`, and SIGINT KeyboardInterrupt,
    after a line on stderr. Otherwise the first signal is noted in the request that is yielded, a second SIGTERM or
    SIGINT raises these exceptions, and `grace_s` seconds after the first signal the block ends with GracePeriodExpired.
    Further SIGTERMs are ignored: they would interrupt the clean-up. A SIGHUP that `nohup` ignores stays ignored, and so
    does, where nothing is saved, a SIGINT that a shell has ignored in its background.

    If the main thread hangs in a library and the block does not end within CLEANUP_S, the process ends with the exit
    code that it would have had.
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
        # Only these two leave Ray's calls, SystemExit with another code; `reason` keeps the error.
        raise error if isinstance(error, KeyboardInterrupt | SystemExit) else SystemExit

    def receive(number: int, frame: object) -> None:
        if grace_s is None:
            _say(f"{signal.Signals(number).name}: the run ends now, as it saves no checkpoints (trainer.save_freq)")
            leave(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        first = not request.is_set
        if not first and number == signal.SIGHUP:
            return  # a closing terminal signals twice, by the system and by the shell
        if not first and request.signal is not signal.SIGHUP:  # a closing login adds a SIGTERM: no second request
            leave(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        request.signal = signal.Signals(number)
        if first:
            request.deadline = time.monotonic() + grace_s
            request.last_resort.arm(grace_s + CLEANUP_S, GracePeriodExpired.exit_code)
            signal.setitimer(signal.ITIMER_REAL, max(grace_s, SHORTEST_TIMER_S))
        second = "" if number == signal.SIGHUP else "; a second signal ends it now"
        _say(f"{request.signal.name}: the run saves and stops within {grace_s:g} s (trainer.stop_grace_s){second}")

    def ring(number: int, frame: object) -> None:
        sent = "the signal" if request.signal is None else request.signal.name
        leave(
            GracePeriodExpired(
                f"the run could not save within trainer.stop_grace_s={grace_s:g} s of {sent}; the last "
                "complete checkpoint stands; try: more seconds than saving, and giving up a step, take"
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
    """A handler that ends this process. previous: the handler that it replaces. code: None: 128 + signal."""

    def __init__(self, previous: _Handler, code: int | None) -> None:
        self.previous, self._code = previous, code

    def __call__(self, number: int, frame: object) -> None:
        name = signal.Signals(number).name
        _say(f"{name}: stopped while the command was starting; no process was started, and nothing was written")
        os._exit(128 + number if self._code is None else self._code)


def quit_on_signals(code: int | None = None) -> None:
    """Until `restore_signals`, SIGTERM, Ctrl-C and SIGHUP print one line and end this process, unless it ignores them.

    For the time in which libraries are imported: they may catch any exception, and there is nothing to clean up.
    code: the exit code, which a later call may change; None: 128 + signal.
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
    """Return the exit code of a process that this exception ends."""
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
    """Restore the SIGTERM handler after this block, because `ray.init` installs its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
