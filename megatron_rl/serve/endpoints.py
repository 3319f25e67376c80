"""The Tinker API over HTTP on this machine, in a thread of its own. TLS and other machines are a proxy's work."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

from aiohttp import web

from megatron_rl.agents.endpoint import BROKEN, own_log
from megatron_rl.errors import ConfigError
from megatron_rl.plain_values import describe_error
from megatron_rl.serve.bad_request import BadRequest, nearest_sentence
from megatron_rl.serve.command_log import CommandReply
from megatron_rl.serve.desk import Desk
from megatron_rl.serve.request_values import ServedModel, whole
from megatron_rl.serve.saved_states import SCHEME
from megatron_rl.serve.service import TrainingService, read_body
from megatron_rl.serve.tenant_keys import key_digest

HOST = "127.0.0.1"
HOSTS = {HOST, "localhost"}
PROTOBUF = "application/x-protobuf"
START = "/api/v1/"
LARGEST_BODY = 16 << 20
"""Bytes of a request. The SDK cuts passes into requests of 5 MB."""
POLL_S = 20.0
"""Seconds that a question for a reply waits, below the 45 s after which the SDK gives up."""
IDLE_S = 120.0
"""Seconds in which a client may send nothing of a body that it has begun."""

CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
    "sample_max_concurrent_requests": 1000,
    "use_pyqwest_transport": False,
}
"""Settings of the SDK for this service: no compressed bodies, no losses that run here."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


Read = Callable[[Desk, str, web.Request], dict[str, Any]]
"""(desk, tenant, request) -> the reply to a request that changes nothing."""
RUN = "training_runs/{run}"
CHECKPOINT = RUN + "/checkpoints/{folder}/{name}"
MOST_ROWS = 1000
"""The most entries on one page of a list."""


def _page(name: str, rows: Sequence[Any], request: web.Request) -> dict[str, Any]:
    """The part of a list that a request asks for. Raises BadRequest."""
    asked = {key: int(text) if text.isdecimal() else text for key, text in request.query.items()}
    first = whole(asked, "offset", 0, 1 << 53, 0)
    limit = whole(asked, "limit", 0, MOST_ROWS, 100)
    cursor = {"offset": first, "limit": limit, "total_count": len(rows)}
    return {name: rows[first : first + limit], "cursor": cursor}


READS: dict[str, Read] = {
    "training_runs": lambda desk, tenant, asked: _page("training_runs", desk.training_runs(tenant), asked),
    RUN: lambda desk, tenant, asked: desk.training_run(tenant, asked.match_info["run"]),
    RUN + "/checkpoints": lambda desk, tenant, asked: {
        "checkpoints": desk.checkpoints(tenant, asked.match_info["run"])
    },
    "checkpoints": lambda desk, tenant, asked: _page("checkpoints", desk.checkpoints(tenant)[::-1], asked),
    "sessions": lambda desk, tenant, asked: _page("sessions", desk.sessions(tenant), asked),
    "sessions/{session}": lambda desk, tenant, asked: desk.session(tenant, asked.match_info["session"]),
    "samplers/{sampler}": lambda desk, tenant, asked: desk.sampler_info(tenant, asked.match_info["sampler"]),
}
"""Paths that are read."""


class Endpoints:
    """Listens from entry to exit. url: where."""

    def __init__(self, service: TrainingService, served: ServedModel, keys: Mapping[str, str], port: int) -> None:
        """keys: `read_keys`. port: 0 for any that is free."""
        self._service, self._served, self._keys, self._port = service, served, keys, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoints", daemon=True)
        self._heard = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.url = ""

    def __enter__(self) -> Self:
        """Raises ConfigError where the port is taken."""
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        except OSError as error:
            self.__exit__()
            raise ConfigError(f"--port {self._port} cannot be listened to: {error}; try: another one") from None
        self._service.heard = self._tell
        return self

    def __exit__(self, *_: object) -> None:
        if self._runner is not None:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _tell(self) -> None:
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        """Have every waiting question look again."""
        self._heard.set()
        self._heard = asyncio.Event()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[self._checked])
        posts = {
            "client/config": self._constant(CLIENT_CONFIG),
            "client/dynamic_config": self._constant({}),
            "telemetry": self._constant({"status": "accepted"}),
            "retrieve_future": self._retrieve,
        }
        for name, handler in posts.items():
            app.router.add_post(START + name, handler)
        app.router.add_post(START + "{name}", self._post)
        app.router.add_post(START + "sessions/{session}/finish", self._finish)
        app.router.add_delete(START + CHECKPOINT, self._delete)
        app.router.add_put(START + CHECKPOINT + "/ttl", self._set_ttl)
        app.router.add_get(START + "healthz", self._constant({"status": "ok"}))
        app.router.add_get(START + "get_server_capabilities", self._constant(self._capabilities))
        for path, read in READS.items():
            app.router.add_get(START + path, self._read(read))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, logger=own_log())
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, self._port)
        await site.start()
        self.url = f"http://{HOST}:{self._runner.addresses[0][1]}"

    @property
    def _capabilities(self) -> dict[str, Any]:
        name, longest = self._served.base_model, self._served.longest
        model = {"model_name": name, "max_context_length": longest, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse other hosts and unknown keys, and reply to every refusal with its field and sentence."""
        try:
            self._check_head(request)
            return await handler(request)
        except BadRequest as refusal:
            found: tuple[int, str, str] = (refusal.status, refusal.field, str(refusal))
        except web.HTTPRequestEntityTooLarge:
            found = (413, "body", f"body: it has more than {LARGEST_BODY} bytes; try: fewer data in a request")
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            found = (error.status, "path", f"path: {request.method} {request.path!r:.100} is not served")
        except BROKEN as error:
            found = (400, "body", f"body: it cannot be read: {describe_error(error)}")
        except TimeoutError:
            found = (408, "body", f"body: it has not arrived within {IDLE_S:g} s")
        status, field, text = found
        return web.json_response({"detail": text, "field": field}, status=status)

    def _check_head(self, request: web.Request) -> None:
        host = request.headers.get("Host", "").rpartition(":")[0] or request.headers.get("Host", "")
        if host not in HOSTS:
            raise BadRequest("Host", f"{host!r:.80} is not this service; try: {HOST}", 403)
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise BadRequest("Content-Encoding", "only bodies that are not compressed are taken; try: identity", 415)
        tenant = self._keys.get(key_digest(request.headers.get("X-API-Key", "")))
        if tenant is None:
            raise BadRequest("X-API-Key", "this key opens nothing here; try: one of the service's file of keys", 401)
        request["tenant"] = tenant

    @staticmethod
    def _constant(content: dict[str, Any]) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            await _body(request)
            return web.json_response(content)

        return handler

    async def _post(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._service.names:
            raise BadRequest("path", nearest_sentence(name, self._service.names), 404)
        content, is_json = await _body(request), request.content_type != PROTOBUF
        return await self._posted(request, name, content, is_json)

    async def _posted(self, request: web.Request, name: str, content: bytes, is_json: bool) -> web.StreamResponse:
        post = self._service.post
        reply = await self._loop.run_in_executor(None, post, request["tenant"], name, content, is_json)
        return web.json_response(reply)

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        await _body(request)
        return await self._of_path(request, "finish_session", {"session_id": request.match_info["session"]})

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        return await self._of_path(request, "delete_checkpoint", {"path": _checkpoint(request)})

    async def _set_ttl(self, request: web.Request) -> web.StreamResponse:
        sent = read_body(await _body(request), is_json=True).values.get("ttl_seconds")
        return await self._of_path(request, "set_checkpoint_ttl", {"path": _checkpoint(request), "ttl_seconds": sent})

    async def _of_path(self, request: web.Request, name: str, values: dict[str, Any]) -> web.StreamResponse:
        """Take a request whose values are in its path."""
        return await self._posted(request, name, json.dumps(values).encode(), True)

    def _read(self, read: Read) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            with self._service.reading() as desk:
                return web.json_response(read(desk, request["tenant"], request))

        return handler

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        """Wait for a reply, for as long as a question may wait."""
        name = self._service.request_named(await _body(request))
        until, reply = time.monotonic() + POLL_S, None
        while reply is None and (left := until - time.monotonic()) > 0:
            heard = self._heard
            reply = self._service.reply_to(request["tenant"], name)
            if reply is None:
                try:
                    await asyncio.wait_for(heard.wait(), min(left, 1.0))
                except TimeoutError:
                    continue
        if reply is None:
            return web.json_response({"type": "try_again", "request_id": name, "queue_state": "active"})
        return _response(reply)


def _response(reply: CommandReply) -> web.Response:
    if isinstance(reply.content, bytes):
        return web.Response(body=reply.content, content_type=PROTOBUF)
    return web.json_response(reply.content)


def _checkpoint(request: web.Request) -> str:
    """The path of the checkpoint that a request names."""
    return f"{SCHEME}{request.match_info['run']}/{request.match_info['folder']}/{request.match_info['name']}"


async def _body(request: web.Request) -> bytes:
    async with asyncio.timeout(IDLE_S):
        return await request.read()
