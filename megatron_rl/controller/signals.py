"""SIGTERM in the driver: turned into an ordinary exit, so that `with` blocks close what they opened."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGTERM_EXIT_CODE = 128 + signal.SIGTERM


@contextmanager
def graceful_signals() -> Iterator[None]:
    """Inside this block a SIGTERM raises `SystemExit(143)`; the main thread must enter it, outside every other block.

    Only the first SIGTERM counts: a second one would interrupt the cleaning up that the first one asked for.
    """
    received = False

    def leave(signum: int, frame: object) -> None:
        nonlocal received
        received = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(SIGTERM_EXIT_CODE)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if received:  # an exit raised inside a Ray call comes out of it as SystemExit(1)
            raise SystemExit(SIGTERM_EXIT_CODE) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


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
