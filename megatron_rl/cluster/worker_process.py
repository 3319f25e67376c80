"""The process of one rank, and what the driver hears from it.

On the rank's side a Ray actor holds the user's worker and reports failures as plain values; on the driver's side
`read_failure` speaks in the name of a process that can no longer report.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray import ObjectRef, cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from megatron_rl.cluster.call_arguments import Message, Payload, unpack
from megatron_rl.cluster.failures import RankFailure, describe
from megatron_rl.cluster.handle import HOST, Target
from megatron_rl.cluster.heartbeat import Heartbeat, MonitorAddress
from megatron_rl.cluster.loading import without_collections
from megatron_rl.cluster.reaper import settle_in
from megatron_rl.dispatch import Coordinates, is_collector

PORTS = range(20_000, 32_768)
"""Above those of Ray's workers, below those that Linux gives away by itself."""


@dataclass(frozen=True)
class ProcessInfo:
    """Where a rank's process runs; gpus: those that Ray shows it, as CUDA_VISIBLE_DEVICES names them."""

    pid: int
    node_id: str
    host: str
    gpus: str = ""

    @property
    def where(self) -> str:
        """What a message calls it."""
        return f"process {self.pid} on node {self.host}"

    @property
    def is_local(self) -> bool:
        """Whether it runs on this process's node."""
        return bool(self.node_id == ray.get_runtime_context().get_node_id())


class Call(NamedTuple):
    """What one rank was asked to do."""

    rank: int
    role: str
    method: str


class Answered(NamedTuple):
    """A method's answer, and when it ran here, in seconds since the epoch."""

    value: Any
    start: float
    stop: float


def listen(host: str) -> socket.socket:
    """A socket that listens on `host` alone, at a port of those that the system gives to nobody who asks for any.

    It is held from now on: Ray and gloo open many ports before it is used.
    """
    first = secrets.randbelow(len(PORTS))  # not the same in two processes whose generators have one seed
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (*PORTS[first:], *PORTS[:first]):
        with contextlib.suppress(OSError):
            return socket.create_server((host, port), family=family)
    raise OSError(f"no port of {host} from {PORTS.start} to {PORTS.stop - 1} is free")


class RankFailed(Exception):
    """A failure on its way through Ray: raised on the rank, found as the `cause` of Ray's own error on the driver."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailed, (self.failure,)


class WorkerProcess:
    """One rank: created empty, constructs its host when asked, then runs methods (`with_methods` adds them).

    The host class is imported in `construct`, not on creation, so that a failing import is reported like any other
    failure. Whatever the host raises leaves this class as `RankFailed`; after that every call raises the same.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._settled = settle_in()
        self._host: Any = None
        self._heartbeat: Heartbeat | None = None
        self._place: Coordinates | None = None
        self._failure: RankFailure | None = None
        self._peers: list[ActorHandle] = []

    def describe_process(self) -> ProcessInfo:
        """Answer once the process is up."""
        node, host = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return ProcessInfo(os.getpid(), node, host, os.environ.get("CUDA_VISIBLE_DEVICES", ""))

    def listen_for_ranks(self, host: str) -> int:
        """Listen on `host`, for the host to meet the other ranks there; the port."""
        listener = listen(host)
        port: int = listener.getsockname()[1]
        os.environ["MASTER_LISTEN_FD"] = str(listener.detach())
        return port

    def construct(self, role: str, env: dict[str, str], pickled: bytes, monitor: MonitorAddress) -> Coordinates:
        """Build the host from `cloudpickle.dumps((host_class, args))`, with `env` in the environment; its place."""

        def build() -> Coordinates:
            with without_collections():
                host_class, args = cloudpickle.loads(pickled)
                self._host = host_class(*args)
            coordinates: Coordinates = self._host.coordinates()
            return coordinates

        os.environ.update(env)
        self._heartbeat = Heartbeat(self._rank, monitor)
        self._place = self._attempt(role, "__init__", build)
        return self._place

    def meet(self, peers: list[ActorHandle]) -> None:
        """Become the rank that `relay`s calls to these, the other ranks of its node."""
        self._peers = peers

    def relay(self, role: str, method: str, ray_method: str, messages: Sequence[Message]) -> list[Any]:
        """Run a method here and on the peers, whose messages come after this rank's own; answers in the same order.

        Raises RankFailed for a peer, too. A peer that fails while this rank waits for it in the method tells the driver
        itself.
        """
        own, *others = messages
        answers = [
            getattr(peer, ray_method).remote(*message) for peer, message in zip(self._peers, others, strict=True)
        ]
        mine = getattr(self, ray_method)(*[ray.get(part) if isinstance(part, ObjectRef) else part for part in own])
        try:
            return [mine, *ray.get(answers)]
        except RayError:
            ready, _ = ray.wait(answers, num_returns=len(answers), timeout=0)
            calls = {answer: Call(self._rank + 1 + number, role, method) for number, answer in enumerate(answers)}
            failures = [read_failure(answer, calls[answer]) for answer in ready]
            raise RankFailed(next(failure for failure in failures if failure is not None)) from None

    def _run(self, target: Target, message: Sequence[bytes | Payload]) -> Answered | None:
        """A method's answer, or None where this rank's does not count."""
        args, kwargs = unpack(message)
        start = time.time()
        if target.role == HOST:
            answer = self._attempt(target.who, target.method, getattr(self._host, target.method), *args, **kwargs)
        else:
            answer = self._attempt(target.who, target.method, self._host.run, target.role, target.method, args, kwargs)
        counts = self._place is None or is_collector(target.mark.dispatch, self._place)
        return Answered(answer, start, time.time()) if counts else None

    def _attempt(self, role: str, method: str, body: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        heartbeat = self._heartbeat
        if heartbeat is None:
            raise RuntimeError(f"{method} before the rank is constructed")
        if self._failure is None:
            try:
                with heartbeat.during(role, method):
                    return body(*args, **kwargs)
            except (Exception, SystemExit) as error:
                self._failure = describe(error, rank=self._rank, role=role, method=method)
                heartbeat.report_failure(self._failure.as_json())
        raise RankFailed(self._failure) from None


def with_methods(name: str, methods: Mapping[str, Target]) -> type[WorkerProcess]:
    """A WorkerProcess called `name` with these methods; each takes what `call_arguments.pack` made.

    The method called is no argument, so that a call without arguments carries nothing; `ps` shows
    it, too.
    """

    def calling(method_name: str, target: Target) -> Callable[..., Any]:
        def run(self: WorkerProcess, *message: bytes | Payload) -> Any:
            return self._run(target, message)

        run.__name__ = run.__qualname__ = method_name
        return run

    return type(name, (WorkerProcess,), {name: calling(name, target) for name, target in methods.items()})


def read_failure(answer: ObjectRef, call: Call, where: str = "") -> RankFailure | None:
    """Why an answer, which must be ready, is none; in the name of its process where that cannot say so itself.

    None if it is one. where: `ProcessInfo.where`, if it is known.
    """
    try:
        ray.get(answer)
    except RayTaskError as error:
        if isinstance(error.cause, RankFailed):
            return error.cause.failure
        return RankFailure(
            *call,
            error_type=type(error).__name__,
            message=str(error).splitlines()[-1],
            traceback=str(error),
            wall_time=time.time(),
        )
    except RayError as error:
        details = [line for line in str(error).splitlines()[1:] if not line.startswith("\t")]
        return RankFailure(
            *call,
            error_type=type(error).__name__,
            message=(f"It was {where}. " if where else "") + ("\n".join(details) or str(error)),
            traceback="",
            wall_time=time.time(),
            died=True,
        )
    return None
