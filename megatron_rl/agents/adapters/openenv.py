"""An environment behind a server of OpenEnv (`adapter:openenv`): one WebSocket for each episode, with reset and step.
The package `websockets` is all that it needs.

kwargs: url, or urls by name, among which a row chooses with `extra_info.server`; action, the field of an action that is
the policy's text; observation, the field of an observation that the policy reads (null: all of it, as JSON);
reset_fields, names in `extra_info` that `reset` is given, next to a seed (`extra_info.seed`, else the row's index);
opens: the first observation replaces the prompt of the row; timeout_s: of one reply.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import math
from contextlib import suppress
from typing import Any

import websockets.asyncio.client

LARGEST_MESSAGE = 1 << 26


class Environment:
    """One episode. A server that is away, late, or replies twice or with rubbish is an error of the episode."""

    @staticmethod
    def check(url: str | None = None, urls: dict[str, str] | None = None, **kwargs: Any) -> None:
        """Raise ValueError where there is no server to ask."""
        for address in _servers(url, urls).values():
            _endpoint(address)

    def __init__(
        self,
        url: str | None = None,
        urls: dict[str, str] | None = None,
        action: str = "message",
        observation: str | None = None,
        reset_fields: tuple[str, ...] = (),
        opens: bool = False,
        timeout_s: float = 30.0,
    ) -> None:
        self._servers, self._action, self._field = _servers(url, urls), action, observation
        self._reset_fields, self._opens, self._timeout_s = reset_fields, opens, timeout_s
        self._replies: asyncio.Queue[Any] = asyncio.Queue()
        self._socket: Any = None

    async def reset(self, row: dict[str, Any]) -> None:
        """Connect to the row's server and begin."""
        self._row, extra = row, row.get("extra_info") or {}
        name = extra.get("server", next(iter(self._servers)))
        if name not in self._servers:
            near = difflib.get_close_matches(str(name), self._servers, 1, 0.0)[0]
            raise ValueError(f"row {row['index']}: extra_info.server={name} is none of urls; did you mean: {near}")
        url = _endpoint(self._servers[name])
        try:
            self._socket = await websockets.asyncio.client.connect(
                url, open_timeout=self._timeout_s, max_size=LARGEST_MESSAGE, proxy=None
            )
        except Exception as error:
            raise ConnectionError(f"{url} cannot be reached: {error!r:.200}") from None
        self._reading = asyncio.ensure_future(self._read())
        fields = {name: extra[name] for name in self._reset_fields if name in extra}
        seed = extra.get("seed", row["index"])
        self._first, _, is_done = await self._ask("reset", {"seed": int(seed), **fields})
        if is_done:
            raise ValueError("the episode is done before its first step")

    def opening(self) -> Any:
        """Return the first observation, or the prompt of the row."""
        return self._first if self._opens else self._row["prompt"]

    async def step(self, turn: Any) -> tuple[str, float, bool]:
        """Send the policy's text as an action."""
        return await self._ask("step", {self._action: turn.text})

    async def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._reading.cancel()
            with suppress(Exception):
                await self._socket.send(json.dumps({"type": "close"}))
            await self._socket.close()

    async def _read(self) -> None:
        try:
            async for message in self._socket:
                self._replies.put_nowait(message)
            reason = "it has closed the connection"
        except Exception as error:
            reason = repr(error)[:200]
        self._replies.put_nowait(ConnectionError(f"the server has gone: {reason}"))

    async def _ask(self, kind: str, data: dict[str, Any]) -> tuple[str, float, bool]:
        if not self._replies.empty():
            waiting = self._replies.get_nowait()
            raise (
                waiting if isinstance(waiting, Exception) else ValueError(f"the server replied twice: {waiting!r:.80}")
            )
        try:
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        except Exception as error:
            raise ConnectionError(f"the server has gone: {error!r:.200}") from None
        try:
            reply = await asyncio.wait_for(self._replies.get(), self._timeout_s)
        except TimeoutError:
            raise TimeoutError(f"the server has not replied to {kind} within {self._timeout_s:g} s") from None
        if isinstance(reply, Exception):
            raise reply
        return self._parsed(kind, reply)

    def _parsed(self, kind: str, reply: str | bytes) -> tuple[str, float, bool]:
        try:
            message = json.loads(reply)
            data = message["data"]
            if message["type"] == "error":
                raise ValueError(f"the server refused {kind}: {str(data.get('message', data))[:200]}")
            seen, reward, is_done = data["observation"], data.get("reward") or 0.0, data.get("done", False)
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise TypeError(f"reward={reward!r:.20}")
            text = json.dumps(seen) if self._field is None else str(seen[self._field])
            return text, float(reward), bool(is_done)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"the server's reply to {kind} cannot be read ({error!r:.60}): {reply!r:.100}") from None


def _servers(url: str | None, urls: dict[str, str] | None) -> dict[str, str]:
    servers = {**(urls or {}), **({"default": url} if url else {})}
    if not servers:
        raise ValueError("environment.kwargs must have url, or urls by name")
    return servers


def _endpoint(url: str) -> str:
    """Return the address of the WebSocket of a server's URL."""
    scheme, _, rest = url.partition("://")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if scheme not in schemes or not rest:
        raise ValueError(f"{url} must begin with http://, https://, ws:// or wss://")
    return f"{schemes[scheme]}://{rest.rstrip('/')}/ws"
