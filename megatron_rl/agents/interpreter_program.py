"""Runs a class or a function of a user's file by another interpreter, which has none of this package: the standard
library alone is imported here, and the file.

It reads requests and writes replies, each a line of JSON, on the descriptor that it is given as standard input:

    {"file": ..., "name": ..., "methods": [...], "kwargs": {...}}       -> {"methods": [...]} or {"refused": reason}
    {"id": 1, "episode": 7, "call": "reset", "with": [{...}]}           -> {"id": 1, "returned": null}
    {"id": 2, "episode": 7, "call": "step", "with": [{"text": ...}]}    -> {"id": 2, "returned": ["higher", 0.0, false]}
    {"id": 3, "episode": 7, "call": "close", "with": []}                -> {"id": 3, "returned": null}

or {"id": ..., "raised": text}. A class has an object for each episode. Each call of a function is an episode, and the
call "close" cancels it. Coroutines run side by side, methods that are not `async` one after the other.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's files have the names of other modules

import asyncio
import importlib.util
import inspect
import json
import os
import socket
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

Content = dict[str, Any]


class Served:
    """What a file defines, and the objects of open episodes."""

    def __init__(self, hello: Content) -> None:
        """Load the file. Raises whatever it raises, and ValueError where a name or a method is missing."""
        spec = importlib.util.spec_from_file_location("environment_file", hello["file"])
        if spec is None or spec.loader is None:
            raise ValueError(f"{hello['file']} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules["environment_file"] = module
        spec.loader.exec_module(module)
        self._made = getattr(module, hello["name"], None)
        if self._made is None:
            raise ValueError(f"{hello['file']} must define {hello['name']}")
        self._kwargs: Content = hello["kwargs"]
        self._episodes: dict[int, Any] = {}
        self._tasks: dict[int, asyncio.Future[Any]] = {}
        self._one_thread = ThreadPoolExecutor(1)
        self.methods = [name for name in dir(self._made) if inspect.isclass(self._made) and not name.startswith("_")]
        lacking = [name for name in hello["methods"] if name not in self.methods]
        if lacking:
            raise ValueError(
                f"{hello['name']} must have the methods {', '.join(hello['methods'])}; it has no {lacking[0]}"
            )
        self._check_kwargs(hello["name"])
        if not inspect.isclass(self._made):
            check = getattr(module, "check", None) if hello["name"] != "rows" else None  # its arguments are an agent's
            check and check(**self._kwargs)
        elif hasattr(self._made, "check"):
            self._made.check(**self._kwargs)

    def _check_kwargs(self, name: str) -> None:
        """Raise ValueError for keyword arguments that the class or the function does not take."""
        given = (
            () if inspect.isclass(self._made) else ("name", "size", "seed") if name == "rows" else ("task", "endpoint")
        )
        try:
            signature = inspect.signature(self._made)  # type: ignore[arg-type]
        except ValueError:
            return
        try:
            signature.bind(*given, **self._kwargs)
        except TypeError as error:
            raise ValueError(f"kwargs must be arguments of {name}: {error}; it takes {signature}") from None

    async def call(self, asked: Content) -> Any:
        """Return the value of a method of an episode's object, or of the function."""
        episode, name, given = asked["episode"], asked["call"], [as_object(value) for value in asked["with"]]
        if not inspect.isclass(self._made):
            return await self._call_function(episode, name, asked["with"])
        if name == "close":
            kept = self._episodes.pop(episode, None)
            return await self._result(kept.close) if hasattr(kept, "close") else None
        if name == "reset":
            given = asked["with"]
            self._episodes[episode] = await self._result(self._made, **self._kwargs)
        return await self._result(getattr(self._episodes[episode], name), *given)

    async def _call_function(self, episode: int, name: str, given: list[Any]) -> Any:
        if name == "close":
            task = self._tasks.pop(episode, None)
            return task and task.cancel() and None
        if name != "run":
            return await _in_thread(self._made, *given, **self._kwargs)
        task, address = given
        if inspect.iscoroutinefunction(self._made):
            running = asyncio.ensure_future(self._made(task, SimpleNamespace(**address), **self._kwargs))
        else:
            running = asyncio.ensure_future(_in_thread(self._made, task, SimpleNamespace(**address), **self._kwargs))
        self._tasks[episode] = running
        try:
            return await running
        finally:
            self._tasks.pop(episode, None)

    async def _result(self, function: Any, *given: Any, **named: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*given, **named)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._one_thread, lambda: function(*given, **named))


class CallFailed(Exception):
    """A call in a thread has raised; the message is the text of its exception."""


async def _in_thread(function: Any, *given: Any, **named: Any) -> Any:
    """Call a function in a thread of its own: those in a pool would wait for others that wait for the policy."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        try:
            value = function(*given, **named)
        except BaseException as error:
            loop.call_soon_threadsafe(_settle, ended.set_exception, ended, CallFailed(described(error)))
        else:
            loop.call_soon_threadsafe(_settle, ended.set_result, ended, value)

    threading.Thread(target=run, daemon=True).start()
    return await ended


def _settle(set_it: Any, ended: asyncio.Future[Any], value: Any) -> None:
    if not ended.done():
        set_it(value)


def as_object(value: Any) -> Any:
    """Return JSON values as objects with attributes: a turn, and the calls in it."""
    if isinstance(value, dict):
        calls = [SimpleNamespace(**call) for call in value.get("calls", ())]
        return SimpleNamespace(**{**value, "calls": calls})
    return value


def described(error: BaseException) -> str:
    """Return an exception as one text, with the line that raised it."""
    if isinstance(error, CallFailed):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


async def serve(channel: socket.socket) -> None:
    """Reply to requests until the other side has gone."""
    loop, writing = asyncio.get_running_loop(), threading.Lock()
    requests: asyncio.Queue[Content] = asyncio.Queue()

    def read() -> None:
        with channel.makefile("rb") as file:
            for line in file:
                loop.call_soon_threadsafe(requests.put_nowait, json.loads(line))
        os._exit(0)  # a call that never returns would hold up any other end

    def write(line: str) -> None:
        with writing:
            channel.sendall(line.encode() + b"\n")

    async def answer(served: Served, asked: Content) -> None:
        try:
            line = json.dumps({"id": asked["id"], "returned": await served.call(asked)}, allow_nan=False)
        except BaseException as error:
            line = json.dumps({"id": asked["id"], "raised": described(error)})
        write(line)

    threading.Thread(target=read, daemon=True).start()
    hello = await requests.get()
    try:
        served = Served(hello)
    except BaseException as error:
        reason = described(error)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        return write(json.dumps({"refused": reason, "missing": missing}))
    write(json.dumps({"methods": served.methods}))
    tasks = set()
    while True:
        task = asyncio.ensure_future(answer(served, await requests.get()))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    own = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # prints of the user's code are no replies
    asyncio.run(serve(own))
