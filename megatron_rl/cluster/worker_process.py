"""The process of one rank, and the reports that the driver gets from it.

On the rank's side a Ray actor holds the host and reports failures as plain values. On the driver's side `read_failure`
describes the failure of a process that can no longer report.
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
"""Above the ports of Ray's workers, below the ports that Linux assigns by itself."""


@dataclass(frozen=True)
class ProcessInfo:
    """Where a rank's process runs. gpus: the GPUs that Ray shows it, in the form of CUDA_VISIBLE_DEVICES."""

    pid: int
    node_id: str
    host: str
    gpus: str = ""

    @property
    def where(self) -> str:
        """The process's name in messages."""
        return f"process {self.pid} on node {self.host}"

    @property
    def is_local(self) -> bool:
        """Whether it runs on the node of the calling process."""
        return bool(self.node_id == ray.get_runtime_context().get_node_id())


class Call(NamedTuple):
    """A call of a method on one rank."""

    rank: int
    role: str
    method: str


class Answered(NamedTuple):
    """A method's answer, and when the method ran on the rank, in seconds since the epoch."""

    value: Any
    start: float
    stop: float


def listen(host: str) -> socket.socket:
    """Return a socket that listens on `host` alone, at a port that the system does not assign by itself.

    The socket holds the port until it is used: Ray and gloo open many ports meanwhile.
    """
    first = secrets.randbelow(len(PORTS))  # not the same in two processes whose generators have one seed
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (*PORTS[first:], *PORTS[:first]):
        with contextlib.suppress(OSError):
            return socket.create_server((host, port), family=family)
    raise OSError(f"no port of {host} from {PORTS.start} to {PORTS.stop - 1} is free")


class RankFailed(Exception):
    """Carries a failure through Ray: the rank raises it, and on the driver it is the `cause` of Ray's own error."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailed, (self.failure,)


class WorkerProcess:
    """One rank: `construct` builds its host, then it runs methods (`with_methods` adds them).

    `construct` also imports the host class, so that a failing import is reported like any other failure. Every
    exception of the host leaves this class as `RankFailed`; after that, every call raises it again.
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
        """Listen on `host`, where the host object will meet the other ranks; return the port."""
        listener = listen(host)
        port: int = listener.getsockname()[1]
        os.environ["MASTER_LISTEN_FD"] = str(listener.detach())
        return port

    def construct(self, role: str, env: dict[str, str], pickled: bytes, monitor: MonitorAddress) -> Coordinates:
        """Build the host from `cloudpickle.dumps((host_class, args))`, with `env` in the environment.

        Returns its coordinates.
        """

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
        """Set the other ranks of this node, to which this rank will `relay` calls."""
        self._peers = peers

    def relay(self, role: str, method: str, ray_method: str, messages: Sequence[Message]) -> list[Any]:
        """Run a method here and on the peers; return the answers in the order of the messages, of which the first is
        this rank's own.

        Raises RankFailed, also for a peer. A peer that fails while this rank waits for it in the method reports to the
        driver itself.
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
        """Run a method; return its answer, or None if this rank is no collector."""
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
    """Return a WorkerProcess class called `name` with these methods; each takes a message of `call_arguments.pack`.

    The method's name is no argument, so a call without arguments carries no data; `ps` shows the method too.
    """

    def calling(method_name: str, target: Target) -> Callable[..., Any]:
        def run(self: WorkerProcess, *message: bytes | Payload) -> Any:
            return self._run(target, message)

        run.__name__ = run.__qualname__ = method_name
        return run

    return type(name, (WorkerProcess,), {name: calling(name, target) for name, target in methods.items()})


def read_failure(answer: ObjectRef, call: Call, where: str = "") -> RankFailure | None:
    """Return the failure behind a ready answer, also where the process has died; None if there is no failure.

    where: `ProcessInfo.where`, if it is known.
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
