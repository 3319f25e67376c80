"""An agent of the user's as an environment: its requests are what the policy reads, the policy's turns its replies.

So its episodes are exact to the token, recorded and repeated as all others are. No torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_rl.agents.agent_programs import ARGUMENTS, AgentProgram, CommandAgent, FunctionAgent, Start
from megatron_rl.agents.chat_request import ChatRequest
from megatron_rl.agents.endpoint import Endpoint, EndpointLimits, Session
from megatron_rl.agents.environment_host import EnvironmentHost
from megatron_rl.agents.environment_source import EnvironmentSource
from megatron_rl.agents.image_parts import EpisodeImages, as_url
from megatron_rl.agents.observation import EpisodeError, InitialConversation, Observation, TaskRow, TextLimit, Turn
from megatron_rl.config.user_functions import load_function

WHOLE_TEXTS = TextLimit(1 << 62)
"""What an agent says is not cut: it would read something else than its policy."""


class AgentEnvironment:
    """Plays one episode with one agent, which is started for it."""

    def __init__(self, start: Start, endpoint: Endpoint, timeout_s: float, reads_images: bool = False) -> None:
        """timeout_s: between two requests of the agent. reads_images: its requests may show some."""
        self.episode_images = EpisodeImages() if reads_images else None
        self._start, self._endpoint, self._timeout_s = start, endpoint, timeout_s
        self._session: Session | None = None
        self._agent: AgentProgram | None = None
        self._asked: ChatRequest | None = None

    async def reset(self, row: TaskRow) -> None:
        """Start the agent at the task of a row."""
        self._session = await self._endpoint.open(self.episode_images)
        self._agent = self._start(task_of(row), self._session)

    async def opening(self) -> InitialConversation:
        """Return the conversation of its first request."""
        asked = await self._next_request()
        if asked is None:
            raise EpisodeError("no_answer", "the agent has ended without a request")
        self._asked = asked
        return asked.opening

    async def step(self, turn: Turn) -> Observation:
        """Give the agent its reply and return the messages of its next request; it is done when the agent is. A request
        that it has cancelled had no reader, and the next one begins another conversation.
        """
        assert self._session is not None and self._asked is not None
        self._session.answer(turn)
        asked, before = await self._next_request(), self._asked
        is_unread = self._session.take_unread()
        reward, counts = self._earned()
        if asked is None:
            return Observation((), reward, True, counts, is_unread=is_unread)
        self._asked = asked
        if is_unread:
            return Observation((), reward, False, counts, asked.opening, is_unread=True)
        new = asked.after(before, turn)
        if not new:
            return Observation((), reward, False, counts, asked.opening)
        return Observation(new, reward, False, counts, options=asked.options)

    async def cut(self, turn: Turn) -> Observation:
        """Tell the agent that its episode has no tokens or turns left, and return its grade.

        One that fails because its requests are refused has given no grade: its rewards so far count. One that
        fails by itself has failed. Raises EpisodeError.
        """
        assert self._session is not None
        if turn.num_tokens:
            self._session.answer(turn)
        self._session.end_turns()
        has_grade = True
        try:
            await self._next_request(may_ask=False)
        except EpisodeError:
            if not self._session.num_late:
                raise
            has_grade = False
        is_unread = self._session.take_unread()
        reward, counts = self._earned()
        counts |= {} if has_grade else {"agent_ungraded": 1.0}
        return Observation((), reward, True, counts, is_unread=is_unread)

    def _earned(self) -> tuple[float, dict[str, float]]:
        """The reward since the last look, and what is counted."""
        assert self._session is not None
        reward, self._session.reward = self._session.reward, 0.0
        refused, self._session.num_refused = self._session.num_refused, 0
        strangers, self._endpoint.num_unauthorized = self._endpoint.num_unauthorized, 0
        closed, self._endpoint.num_closed = self._endpoint.num_closed, 0
        known = {"agent_refused": float(refused), "agent_unauthorized": float(strangers), "agent_closed": float(closed)}
        unknown, self._session.num_unknown_fields = self._session.num_unknown_fields, 0
        cancelled, self._session.num_cancelled = self._session.num_cancelled, 0
        known |= {"agent_unknown_fields": float(unknown), "agent_cancelled": float(cancelled)}
        return reward, {name: number for name, number in known.items() if number}

    async def close(self) -> None:
        """End the agent and its session."""
        if self._session is not None:
            self._endpoint.close(self._session)
        if self._agent is not None:
            await self._agent.stop()

    async def _next_request(self, may_ask: bool = True) -> ChatRequest | None:
        """The agent's next request; None: it has ended. may_ask: False: its requests are refused, and its end alone is
        awaited. Raises EpisodeError where it fails or does not continue.
        """
        assert self._session is not None and self._agent is not None
        asks = self._session.next_request if may_ask else asyncio.Event().wait
        request: asyncio.Future[Any] = asyncio.ensure_future(asks())
        end = asyncio.ensure_future(self._agent.end())
        try:
            first = asyncio.FIRST_COMPLETED
            done, _ = await asyncio.wait((request, end), timeout=self._timeout_s, return_when=first)
            if request in done:
                asked: ChatRequest = request.result()
                return asked
            if end not in done:
                limit = f"multi_turn.tool_timeout_s={self._timeout_s:g}"
                raise EpisodeError("timed_out", f"the agent has not asked again or ended within {limit}")
            self._session.reward += end.result() or 0.0
            return None
        except EpisodeError as error:
            raise EpisodeError(error.cause, str(error).replace(self._session.api_key, "KEY")) from None
        finally:
            for task in (request, end):
                task.cancel()
                if task.done() and not task.cancelled():
                    task.exception()  # reading it keeps asyncio from printing a warning


def task_of(row: TaskRow) -> TaskRow:
    """Return the task of an agent: a row, with its images in the prompt's messages as an agent sends them.

    Raises EpisodeError where the images are not those of the messages.
    """
    if "images" not in row:
        return row
    images = iter(row["images"])

    def sent(part: dict[str, Any]) -> dict[str, Any]:
        is_image = part.get("type") == "image"
        return {"type": "image_url", "image_url": {"url": as_url(next(images))}} if is_image else part

    prompt = row["prompt"]
    try:
        if isinstance(prompt, list):
            prompt = [
                message | {"content": list(map(sent, message["content"]))}
                if isinstance(message["content"], list)
                else message
                for message in prompt
            ]
    except (StopIteration, RuntimeError):
        raise EpisodeError("no_answer", "images of the prompt were cut (data.max_prompt_length)") from None
    return {name: value for name, value in row.items() if name != "images"} | {"prompt": prompt}


@dataclass(frozen=True)
class AgentSource(EnvironmentSource):
    """Agents: the function `name` of the file `path`, or a command. key: of the path. timeout_s: between requests.
    limits: bound its requests. kwargs: the function's.
    """

    path: str | None
    name: str
    key: str
    command: tuple[str, ...]
    timeout_s: float
    limits: EndpointLimits = EndpointLimits(1 << 26)
    kwargs: dict[str, Any] = field(default_factory=dict)

    noun = "the agent"

    def host(self) -> EnvironmentHost:
        start, endpoint = self._start(), Endpoint(self.limits)
        return EnvironmentHost(
            lambda: AgentEnvironment(start, endpoint, self.timeout_s, self.limits.reads_images),
            is_async=True,
            limit=WHOLE_TEXTS,
            opens=True,
            close=endpoint.stop,
            reads_images=self.limits.reads_images,
            hears_cuts=True,
        )

    def _start(self) -> Start:
        if self.path is None:
            return lambda task, session: CommandAgent(self.command, task, session)
        given = (self.path, self.key, self.name, ARGUMENTS)
        function: Callable[..., Any] = load_function(*given, may_be_async=True, kwargs=self.kwargs)
        return lambda task, session: FunctionAgent(partial(function, **self.kwargs), task, session)
