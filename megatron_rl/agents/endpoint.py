"""An endpoint on this machine, through which agents speak with their policy by OpenAI's or Anthropic's protocol.

Every episode has a session with a key of its own. A request waits until the policy has sampled its turn, which the run
does as for any environment. Nothing but this machine can connect. No torch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from megatron_rl.agents.anthropic_messages import AnthropicMessages
from megatron_rl.agents.chat_request import MODEL, ChatProtocol, ChatRequest, OutOfTokensError
from megatron_rl.agents.image_parts import EpisodeImages, Images
from megatron_rl.agents.observation import EpisodeError, Turn
from megatron_rl.agents.openai_chat import OpenAIChat
from megatron_rl.agents.openai_responses import OpenAIResponses
from megatron_rl.agents.request_fields import num_unknown
from megatron_rl.plain_values import describe_error, finite_number, strict_json

HOST = "127.0.0.1"
PROTOCOLS: tuple[ChatProtocol, ...] = (OpenAIChat(), AnthropicMessages(), OpenAIResponses())
LARGEST_BODY = 1 << 26
"""Bytes of one request."""
FIXED_BYTES, BYTES_PER_TOKEN = 1 << 20, 1 << 10
"""Of a request: schemas of tools and names of fields; a token, of which the longest are 128 characters of white space,
six bytes each as an escape of JSON.
"""
SESSION_PATH = "/sessions/{key}"
"""Before the path of a protocol, for harnesses that can set a URL and no key."""
BROKEN = (HttpProcessingError, web.RequestPayloadError, ConnectionError)
"""What a client causes: it sends no HTTP, or hangs up. It has its reply, if it exists."""


def own_log() -> logging.Logger:
    """Where the server tells of errors, of which those of clients are left out: they are no faults of the run."""
    log = logging.getLogger(__name__)
    log.addFilter(_is_own)
    return log


def _is_own(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], BROKEN))


def _is_connected(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def largest_body(num_tokens: int, reads_images: bool = False) -> int:
    """Return how many bytes a request may have whose conversation may have some tokens. reads_images: it may have
    images, whose bytes do not depend on their tokens.
    """
    return LARGEST_BODY if reads_images else min(LARGEST_BODY, FIXED_BYTES + BYTES_PER_TOKEN * num_tokens)


IsConnected = Callable[[], bool]
"""Whether a client has not hung up."""


@dataclass(frozen=True)
class EndpointLimits:
    """num_tokens: that a conversation may have. reads_images: its requests may show some. max_bytes: of one request;
    None: as its tokens need. max_open: sessions at once; None: any number. idle_s: seconds that a client may send
    nothing.
    """

    num_tokens: int = 0
    reads_images: bool = False
    max_bytes: int | None = None
    max_open: int | None = None
    idle_s: float = 3630.0

    @property
    def body(self) -> int:
        """Bytes that one request may have."""
        return self.max_bytes or largest_body(self.num_tokens, self.reads_images)


@dataclass
class _Open:
    """A request of an agent, and the turn that answers it once it is there. clients: that have sent it. is_read: one
    of them has got the turn.
    """

    request: ChatRequest
    number: int
    turn: asyncio.Future[Turn]
    clients: list[IsConnected]
    is_read: bool = False

    @property
    def has_client(self) -> bool:
        """Whether a client waits for the turn."""
        return any(is_connected() for is_connected in self.clients)


@dataclass
class Session:
    """The conversation of one agent. base_url, api_key: what its client needs. reward: what it has earned since the
    last look. num_refused: requests that could not be answered. num_cancelled: those that had no reader. num_late:
    those after the episode had no tokens or turns left. num_unknown_fields: of requests, that no list of fields has.
    images: those of its requests; None: the run reads text alone.
    """

    base_url: str
    api_key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    reward: float = 0.0
    num_refused: int = 0
    num_cancelled: int = 0
    images: EpisodeImages | None = None
    num_late: int = 0
    num_unknown_fields: int = 0
    is_over: bool = False
    _requests: asyncio.Queue[_Open] = field(default_factory=asyncio.Queue)
    _known: list[_Open] = field(default_factory=list)
    _last: _Open | None = None
    _answered: _Open | None = None
    _num_turns: int = 0

    async def next_request(self) -> ChatRequest:
        """Wait for the agent's next request that has not been cancelled."""
        while not (new := await self._requests.get()).has_client:
            self.num_cancelled += 1
            self._known = [known for known in self._known if known is not new]
            new.turn.cancel()
        self._last = new
        return new.request

    def answer(self, turn: Turn) -> None:
        """Answer the last request."""
        self._answered = self._last
        if self._last is not None and not self._last.turn.done():
            self._last.is_read = self._last.has_client
            self._last.turn.set_result(turn)

    def take_unread(self) -> bool:
        """Return, and count, whether the last response had no reader. A client that asked again has read it."""
        answered, self._answered = self._answered, None
        is_unread = answered is not None and not answered.is_read
        self.num_cancelled += is_unread
        return is_unread

    def end_turns(self) -> None:
        """Refuse requests from here on: the episode has no tokens or turns left."""
        self.is_over = True
        for known in self._known:
            if not known.turn.done():
                known.turn.set_exception(OutOfTokensError())
                known.turn.exception()  # a client that has hung up does not read it, which asyncio would report

    def close(self) -> None:
        """Leave the agent's requests without a reply."""
        for known in self._known:
            known.turn.cancel()

    async def ask(self, request: ChatRequest, is_retry: bool, client: IsConnected) -> tuple[int, Turn]:
        """(number, the policy's turn); requests wait for each other. is_retry: the client has sent the same before and
        had no reply. Raises OutOfTokensError once the episode has none left.
        """
        known = next((known for known in self._known if is_retry and known.request == request), None)
        if known is not None:
            known.clients.append(client)
            known.is_read |= known.turn.done()
            return known.number, await asyncio.shield(known.turn)
        if self.is_over:
            raise OutOfTokensError
        self._num_turns += 1
        new = _Open(request, self._num_turns, asyncio.get_running_loop().create_future(), [client])
        self._known = [known for known in self._known if known is self._last or not known.turn.done()] + [new]
        self._requests.put_nowait(new)
        return new.number, await asyncio.shield(new.turn)


class Endpoint:
    """Serves sessions in the running event loop. num_unauthorized: requests with another key. num_closed: sessions
    that were not opened, as there were too many.
    """

    def __init__(self, limits: EndpointLimits = EndpointLimits(max_bytes=LARGEST_BODY)) -> None:
        self.limits = limits
        self.num_closed = 0
        self._sessions: dict[str, Session] = {}
        self._listening: asyncio.Task[str] | None = None
        self._runner: web.AppRunner | None = None
        self.num_unauthorized = 0

    async def open(self, images: EpisodeImages | None = None) -> Session:
        """Open a session; the first one begins to listen. images: gets those of its requests. Raises EpisodeError where
        as many are open as may be.
        """
        if self.limits.max_open is not None and len(self._sessions) >= self.limits.max_open:
            self.num_closed += 1
            limit = f"multi_turn.agent.max_open={self.limits.max_open}"
            raise EpisodeError("no_answer", f"{limit} agents are at work in this process; try: a larger number of them")
        if self._listening is None:
            self._listening = asyncio.ensure_future(self._listen())
        session = Session(await self._listening, images=images)
        self._sessions[session.api_key] = session
        return session

    def close(self, session: Session) -> None:
        """End a session: its key is no longer valid."""
        self._sessions.pop(session.api_key, None)
        session.close()

    async def stop(self) -> None:
        """Listen no longer."""
        for session in list(self._sessions.values()):
            self.close(session)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _listen(self) -> str:
        """Listen on a free port; returns the URL."""
        app = web.Application(client_max_size=self.limits.body)
        for start in ("", SESSION_PATH):
            for protocol in PROTOCOLS:
                app.router.add_post(start + protocol.path, partial(self._chat, protocol))
            app.router.add_get(f"{start}/v1/models", self._models)
            app.router.add_post(f"{start}/v1/reward", self._reward)
        idle_s = self.limits.idle_s
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.0, logger=own_log(), keepalive_timeout=idle_s
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        return f"http://{HOST}:{self._runner.addresses[0][1]}/v1"

    def _session(self, request: web.Request, protocol: ChatProtocol = PROTOCOLS[0]) -> Session:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        key = key if kind == "Bearer" else request.headers.get("x-api-key", "")
        session = self._sessions.get(request.match_info.get("key", key))  # a harness may send a key of its own
        if session is None:
            self.num_unauthorized += 1
            reason = "this key opens no session: each episode has its own"
            body = json.dumps(protocol.refusal(reason, "authentication_error"))
            raise web.HTTPUnauthorized(text=body, content_type="application/json")
        return session

    async def _chat(self, protocol: ChatProtocol, request: web.Request) -> web.StreamResponse:
        session = self._session(request, protocol)
        try:
            images: Images | None = None if session.images is None else {}
            body = await self._body(request)
            session.num_unknown_fields += num_unknown(body)
            asked = protocol.read(body, images)
            if session.images is not None and images:
                session.images.add(images)
            is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            number, turn = await session.ask(asked, is_retry, partial(_is_connected, request))
        except ValueError as error:
            session.num_refused += 1
            return web.json_response(protocol.refusal(str(error), "invalid_request_error"), status=400)
        except OutOfTokensError:
            session.num_late += 1
            return web.json_response(protocol.too_long(self.limits.num_tokens), status=400)
        except asyncio.CancelledError:
            return web.json_response(protocol.refusal("the episode has ended", "not_found_error"), status=410)
        if not asked.streams:
            return web.json_response(protocol.answer(turn, number))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in protocol.stream(turn, number, asked):
            await response.write(event.encode())
        return response

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0}]})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        """Add `{"reward": number}` to what the session's episode has earned."""
        session = self._session(request)
        try:
            body = await self._body(request)
            reward = finite_number(body.get("reward") if isinstance(body, dict) else None)
            if reward is None:
                raise ValueError('a reward must be {"reward": a finite number}')
        except ValueError as error:
            session.num_refused += 1
            return web.json_response(PROTOCOLS[0].refusal(str(error), "invalid_request_error"), status=400)
        session.reward += reward
        return web.json_response({"reward": session.reward})

    async def _body(self, request: web.Request) -> Any:
        """The JSON of a request. Raises ValueError for what is none, is too long, or does not end."""
        try:
            async with asyncio.timeout(self.limits.idle_s):
                return strict_json(await request.read())
        except TimeoutError:
            raise ValueError(f"the body has not arrived within {self.limits.idle_s:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            raise ValueError(f"a request may have {self.limits.body} bytes") from None
        except BROKEN as error:
            raise ValueError(f"the body cannot be read: {describe_error(error)}") from None
