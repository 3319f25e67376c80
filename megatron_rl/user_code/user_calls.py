"""Calls of the user's functions side by side, in threads or in an event loop. Nothing can end a thread: lost ones are
counted. No torch.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from bdb import BdbQuit
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from megatron_rl.errors import GracePeriodExpired
from megatron_rl.plain_values import describe_error

MOST_LOST = 8
"""Lost threads with which a process continues."""
LOST_AFTER_S = 5.0
"""Seconds after which the thread of a call that was given up counts as lost."""


USERS = (KeyboardInterrupt, SystemExit, BdbQuit, GracePeriodExpired)
"""Exceptions with which the user, a signal or a debugger ends the run where the user's code is in its process: they are
no failures of that code.
"""
GRACE_S = 1.0
"""Longest wait for a coroutine that was told to end. It may catch that, as any bare `except` does, and continue."""


class CallFailedError(Exception):
    """A call has raised; the message is the text of its exception, whatever that is."""


class _CallThread(threading.Thread):
    """given_up_at: monotonic time since which nobody waits for its call."""

    given_up_at: float | None = None


async def awaited(call: Awaitable[Any]) -> Any:
    """Return what an `async` call returns. Raises CallFailedError for what is no `Exception`: `SystemExit` would end
    the whole loop, and a `CancelledError` of a task of the user's own would cancel who waits.
    """
    try:
        return await call
    except Exception:
        raise
    except BaseException as error:
        is_signal = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
        if is_signal or is_ending(error):
            raise
        raise CallFailedError(describe_error(error)) from None


async def called(call: Callable[[], Any], is_async: bool) -> Any:
    """Return what a function returns, which is called in a thread if it is not `async`. One that is not, such as a
    decorator's, may return an awaitable all the same. Raises as `awaited` and `in_thread`.
    """
    value = call() if is_async else await in_thread(call)
    return await awaited(value) if inspect.isawaitable(value) else value


async def within(call: Awaitable[Any], limit_s: float) -> Any:
    """Return what a call returns. Raises TimeoutError after limit_s seconds, also where the call does not let itself be
    cancelled; nobody waits for it then.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if task.done():
            return task.result()
    finally:
        task.cancel()
    await ended(task, min(GRACE_S, limit_s / 2))
    raise TimeoutError


async def ended(task: asyncio.Future[Any], limit_s: float = GRACE_S) -> None:
    """Wait until a task that was cancelled has ended, limit_s seconds at most. What it raises is dropped."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait({task}, timeout=limit_s)


def is_ending(error: BaseException) -> bool:
    """Return whether an exception says that the running coroutine must end, and is none of the user's own."""
    if isinstance(error, asyncio.CancelledError):
        with suppress(RuntimeError):  # no loop runs
            task = asyncio.current_task()
            return task is not None and task.cancelling() > 0
        return False
    return isinstance(error, GeneratorExit)


async def in_thread(call: Callable[[], Any]) -> Any:
    """Return what a blocking call returns. Raises CallFailedError where it raises anything, `SystemExit` too.

    It has a thread of its own: in a pool, calls that never return would use up the threads of all others. Given up,
    the thread runs on until the call returns.
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
