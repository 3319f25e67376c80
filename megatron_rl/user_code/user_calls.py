"""Calls of the user's functions side by side, in threads or in an event loop. Nothing can end a thread: lost ones are
counted. No torch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from megatron_rl.plain_values import describe_error

MOST_LOST = 8
"""Lost threads with which a process goes on."""
LOST_AFTER_S = 5.0
"""Seconds after which the thread of a call that was given up counts as lost."""


class CallFailedError(Exception):
    """A call has raised; the message is the text of its exception, whatever that is."""


class _CallThread(threading.Thread):
    """given_up_at: monotonic time since which nobody waits for its call."""

    given_up_at: float | None = None


async def awaited(call: Awaitable[Any]) -> Any:
    """Return what an `async` call returns. Raises CallFailedError for `SystemExit`, which would end the whole loop."""
    try:
        return await call
    except SystemExit as error:
        raise CallFailedError(describe_error(error)) from None


async def in_thread(call: Callable[[], Any]) -> Any:
    """Return what a blocking call returns. Raises CallFailedError where it raises anything, `SystemExit` too.

    It has a thread of its own: in a pool, calls that never return would use up the threads of all others. Where nobody
    waits any longer, the thread runs on until the call returns.
    """
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not ended.done():
            set_it(value)

    def run() -> None:
        try:
            value = call()
        except BaseException as error:
            outcome: tuple[Callable[[Any], None], Any] = (ended.set_exception, CallFailedError(describe_error(error)))
        else:
            outcome = (ended.set_result, value)
        with suppress(RuntimeError):  # the loop has ended, with the run
            loop.call_soon_threadsafe(settle, *outcome)

    thread = _CallThread(target=run, daemon=True)
    thread.start()
    try:
        return await ended
    except asyncio.CancelledError:
        thread.given_up_at = time.monotonic()
        raise


def is_worn_out() -> bool:
    """Return whether this process has lost more than MOST_LOST threads."""
    until = time.monotonic() - LOST_AFTER_S
    calls = (thread for thread in threading.enumerate() if isinstance(thread, _CallThread))
    return sum(thread.given_up_at is not None and thread.given_up_at < until for thread in calls) > MOST_LOST
