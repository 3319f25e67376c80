"""Programs of the user's that are agents: a function of a file, or a command. They speak with the policy through an
endpoint, and know nothing of the run. No torch.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import psutil

from megatron_rl.agents.endpoint import Session
from megatron_rl.agents.observation import EpisodeError, TaskRow
from megatron_rl.cluster.child_processes import how_ended, variables_with
from megatron_rl.plain_values import describe_error, finite_number, plain_text, quote
from megatron_rl.user_code.user_calls import CallFailedError, awaited, in_thread

ARGUMENTS = ("task", "endpoint")
END_S = 5.0
"""Longest wait for a process that was killed."""
LONGEST_TAIL = 2000
"""Characters of a program's last output that a failure quotes."""


@dataclass(frozen=True)
class PolicyAddress:
    """What a client needs: `openai.OpenAI(base_url=..., api_key=...)`, or Anthropic's with `anthropic_base_url`."""

    base_url: str
    api_key: str

    @property
    def anthropic_base_url(self) -> str:
        """The URL to which Anthropic's client adds the version."""
        return self.base_url.removesuffix("/v1")


class AgentProgram(Protocol):
    """One agent that is at its task."""

    async def end(self) -> float | None:
        """Wait until it has ended by itself; returns the reward that it gives. Raises EpisodeError if it has failed."""

    async def stop(self) -> None:
        """End it, if it has not ended."""


Start = Callable[[TaskRow, Session], AgentProgram]


class FunctionAgent:
    """A call of `function(task, endpoint)`: awaited where it is async, else in a thread of its own."""

    def __init__(self, function: Callable[..., Any], task: TaskRow, session: Session) -> None:
        address = PolicyAddress(session.base_url, session.api_key)
        call, is_async = partial(function, task, address), inspect.iscoroutinefunction(function)
        # In a pool of threads agents would wait for those that wait for the policy.
        self._ended = asyncio.ensure_future(awaited(call()) if is_async else in_thread(call))

    async def end(self) -> float | None:
        try:
            value = await asyncio.shield(self._ended)
        except CallFailedError as error:
            raise EpisodeError("raised", f"the agent raised {error}") from None
        except Exception as error:
            raise EpisodeError("raised", f"the agent raised {describe_error(error)}") from None
        reward = finite_number(value)
        if value is not None and reward is None:
            raise EpisodeError("no_answer", f"an agent must return a finite number or None, not {quote(value)}")
        return reward

    async def stop(self) -> None:
        """End a coroutine. A thread cannot be ended: its next request is refused."""
        self._ended.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._ended


class CommandAgent:
    """A process: its task is JSON on standard input, its policy OPENAI_BASE_URL and OPENAI_API_KEY, or those of
    ANTHROPIC. It gives rewards by POST to `reward` of OpenAI's URL.
    """

    def __init__(self, command: Sequence[str], task: TaskRow, session: Session) -> None:
        self._ended = asyncio.ensure_future(self._run(command, task, session))

    async def end(self) -> float | None:
        await asyncio.shield(self._ended)
        return None

    async def stop(self) -> None:
        """Kill it with all that it has started."""
        self._ended.cancel()
        with suppress(asyncio.CancelledError, EpisodeError):
            await self._ended

    async def _run(self, command: Sequence[str], task: TaskRow, session: Session) -> None:
        address = PolicyAddress(session.base_url, session.api_key)
        own = {"OPENAI_BASE_URL": address.base_url, "OPENAI_API_KEY": address.api_key}
        own |= {"ANTHROPIC_BASE_URL": address.anthropic_base_url, "ANTHROPIC_API_KEY": address.api_key}
        variables = variables_with(**own)
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=variables
            )
        except OSError as error:
            raise EpisodeError("raised", f"the agent {command[0]} cannot be started: {error.strerror}") from None
        try:
            content = json.dumps(dict(task), default=str).encode()
            tail, _ = await asyncio.gather(_tail(process), _feed(process, content))
            code = await process.wait()
        finally:
            await _killed(process)
        if code:
            output = f"; it said: {tail}" if tail else ""
            raise EpisodeError("raised", f"the agent {command[0]} {how_ended(code)}{output}")


async def _feed(process: asyncio.subprocess.Process, content: bytes) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # it does not read its task
        process.stdin.write(content)
        await process.stdin.drain()
    process.stdin.close()


async def _tail(process: asyncio.subprocess.Process) -> str:
    """Read all that the process writes, and return the end of it."""
    assert process.stdout is not None
    tail = b""
    while piece := await process.stdout.read(1 << 16):
        tail = (tail + piece)[-4 * LONGEST_TAIL :]
    return plain_text(tail.decode(errors="replace").strip())[-LONGEST_TAIL:]


async def _killed(process: asyncio.subprocess.Process) -> None:
    """Kill a process and its descendants and wait for its end; nothing if it has ended."""
    if process.returncode is not None:
        return
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid)
        for member in (*family.children(recursive=True), family):
            with suppress(psutil.NoSuchProcess):
                member.kill()
    with suppress(TimeoutError):  # something that left the family may hold its pipes
        await asyncio.wait_for(process.wait(), END_S)
