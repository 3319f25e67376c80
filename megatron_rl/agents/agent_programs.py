"""Programs of the user's that are agents: a function of a file, or a command. They speak with the policy through an
endpoint, and know nothing of the run. No torch.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from megatron_rl.agents.endpoint import Session
from megatron_rl.agents.observation import EpisodeError, TaskRow
from megatron_rl.cluster.child_processes import adopter, how_ended, variables_with
from megatron_rl.cluster.programs import Program
from megatron_rl.cluster.stale_processes import AGENT, children_with, end
from megatron_rl.plain_values import describe_error, finite_number, plain_text, quote
from megatron_rl.user_code.user_calls import CallFailedError, called, ended

ARGUMENTS = ("task", "endpoint")
END_S, LOOK_S = 5.0, 0.02
"""Longest wait for processes that were killed, and the time between two looks at them."""
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

    @property
    def session_url(self) -> str:
        """The URL of a client that has no key of its own, or a wrong one; Anthropic's leaves out `/v1`."""
        return f"{self.anthropic_base_url}/sessions/{self.api_key}/v1"


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
        self._ended = asyncio.ensure_future(called(call, is_async))

    async def end(self) -> float | None:
        try:
            value = await asyncio.shield(self._ended)
        except CallFailedError as error:
            raise EpisodeError("raised", f"the agent raised {error}") from None
        except asyncio.CancelledError:
            if self._ended.cancelled():  # it has cancelled itself
                raise EpisodeError("raised", "the agent raised CancelledError") from None
            raise
        except Exception as error:
            raise EpisodeError("raised", f"the agent raised {describe_error(error)}") from None
        reward = finite_number(value)
        if value is not None and reward is None:
            raise EpisodeError("no_answer", f"an agent must return a finite number or None, not {quote(value)}")
        return reward

    async def stop(self) -> None:
        """End a coroutine. A thread, and one that continues, cannot be ended: its next request is refused."""
        self._ended.cancel()
        await ended(self._ended)


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
        own["POLICY_SESSION_URL"] = address.session_url
        mark, content = uuid.uuid4().hex, json.dumps(dict(task), default=str).encode()
        variables, kept = variables_with(**own, **{AGENT: mark}), slice(-4 * LONGEST_TAIL, None)
        try:
            program = Program(command, variables, kept=kept, content=content)
        except OSError as error:
            raise EpisodeError("raised", f"the agent {command[0]} cannot be started: {error.strerror}") from None
        try:
            await program.wait()
        finally:
            code = await program.end()
            await _sweep(mark)
        if code:
            output = plain_text(program.output.decode(errors="replace").strip())[-LONGEST_TAIL:]
            said = f"; it said: {output}" if output else ""
            raise EpisodeError("raised", f"the agent {command[0]} {how_ended(code)}{said}")


async def _sweep(mark: str) -> None:
    """Kill all that an ended program has left, wherever that has gone. mark: of its environment."""
    deadline, left_of_it = time.monotonic() + END_S, partial(children_with, adopter(), mark, AGENT)
    while end(left_of_it, patience_s=0.0) and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_S)
