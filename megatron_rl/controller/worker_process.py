"""The process of one rank, and what the driver hears from it.

On the rank's side a Ray actor holds the user's worker and reports failures as plain values; on the driver's side
`read_report` speaks in the name of a process that can no longer report.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray import ObjectRef, cloudpickle
from ray.exceptions import RayActorError, RayError

from megatron_rl.controller.failures import RankFailure, describe
from megatron_rl.loading import without_collections

_EXIT_TIMEOUT_S = 10.0
PORTS = range(20_000, 32_768)
"""Above those of Ray's workers, below those that Linux gives away by itself."""


@dataclass(frozen=True)
class ProcessInfo:
    """Where a rank's process runs; `free_port` was free on `host` a moment ago."""

    pid: int
    node_id: str
    host: str
    free_port: int


class Call(NamedTuple):
    """What one rank was asked to do."""

    rank: int
    role: str
    verb: str


def free_port() -> int:
    """A port that nothing listens on, of those that the system gives to nobody who asks for any.

    Between this answer and its use Ray and gloo open many of the others.
    """
    ports = list(PORTS)
    random.SystemRandom().shuffle(ports)
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free")


class WorkerProcess:
    """One rank: created empty, then told what to construct, then called verb by verb.

    The worker class is imported in `construct`, not on creation, so that a failing import is reported like any other
    failure. Nothing raised by the worker leaves this class as an exception.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._worker: Any = None

    def describe_process(self) -> ProcessInfo:
        """Answer once the process is up."""
        host = ray.util.get_node_ip_address()
        return ProcessInfo(os.getpid(), ray.get_runtime_context().get_node_id(), host, free_port())

    def construct(self, role: str, env: dict[str, str], pickled: bytes) -> RankFailure | None:
        """Build the worker from `cloudpickle.dumps((worker_class, args))`, with `env` in the environment."""

        def build() -> None:
            with without_collections():
                worker_class, args = cloudpickle.loads(pickled)
                self._worker = worker_class(*args)

        os.environ.update(env)
        failure, _ = self._attempt(role, "__init__", build)
        return failure

    @ray.method(num_returns=2)
    def call(self, role: str, verb: str, wanted: bool, payload: tuple) -> tuple[Any, RankFailure | None]:
        """Run a verb on `payload` (args, kwargs): (its answer, kept only where it is `wanted`; failure or None).

        The answer comes first because Ray stores the parts in order: one that cannot be pickled fails both.
        """
        args, kwargs = payload
        failure, answer = self._attempt(role, verb, getattr(self._worker, verb), *args, **kwargs)
        return (answer if wanted else None), failure

    def _attempt(
        self, role: str, verb: str, body: Callable, /, *args: Any, **kwargs: Any
    ) -> tuple[RankFailure | None, Any]:
        try:
            return None, body(*args, **kwargs)
        except (Exception, SystemExit) as error:
            return describe(error, rank=self._rank, role=role, verb=verb), None


def read_report(report: ObjectRef, call: Call) -> RankFailure | None:
    """The worker's own report, or one in its name when its process died or Ray could not carry its answer."""
    try:
        return ray.get(report)
    except RayActorError as error:
        details = [line for line in str(error).splitlines()[1:] if not line.startswith("\t")]
        return RankFailure(
            *call,
            error_type=type(error).__name__,
            message="\n".join(details),
            traceback="",
            wall_time=time.time(),
            died=True,
        )
    except RayError as error:
        return RankFailure(
            *call,
            error_type=type(error).__name__,
            message=str(error).splitlines()[-1],
            traceback=str(error),
            wall_time=time.time(),
        )


def wait_until_gone(pids: Sequence[int]) -> None:
    """Return when no process of this node has one of `pids`; those that outlive the time-out are killed."""
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    while pids := [pid for pid in pids if _exists(pid)]:
        if time.monotonic() > deadline:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.02)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
