"""The process of one rank: it builds its host, then runs the host's methods and those of its roles, one at a time."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pickle
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.cluster.device_faults import wait_for_memory
from megatron_rl.cluster.failures import RankFailure, describe
from megatron_rl.cluster.handle import HOST
from megatron_rl.cluster.heartbeat import Heartbeat, MonitorAddress
from megatron_rl.cluster.loading import without_collections
from megatron_rl.cluster.rank_messages import Payload, RankFailed, dumps, loads
from megatron_rl.cluster.ranks import LOOPBACK
from megatron_rl.cluster.shm_files import HELD_BYTES, RankFiles
from megatron_rl.cluster.stale_processes import DRAINS, RUN_ID
from megatron_rl.config.trainer import LEAST_HELD_BYTES
from megatron_rl.dispatch import Coordinates, Dispatch, is_collector

PORTS = range(20_000, 32_768)
"""Above the ports of Ray's workers, below the ports that Linux assigns by itself."""


class Answered(NamedTuple):
    """A method's reply, and when the method ran on the rank, in seconds since the epoch."""

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


class RankWorker:
    """One rank: `construct` builds its host, then `run` runs methods.

    `construct` also imports the host class, so that a failing import is reported like any other failure. Every
    exception of the host leaves this class as `RankFailed`; after that, every call raises it again.
    """

    def __init__(self) -> None:
        self._rank = int(os.environ["RANK"])
        self._name = f"rank {self._rank} of {os.environ['POOL_NAME']}"
        self._host: Any = None
        self._heartbeat: Heartbeat | None = None
        self._place: Coordinates | None = None
        self._failure: RankFailure | None = None
        self._files = RankFiles("", "", float("inf"))  # once it is constructed, its own

    def serve(self, connection: Connection) -> None:
        """Answer messages until the other end is closed."""
        while True:
            show_title(self._name)
            try:
                message = connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(self._reply(message))

    def listen_for_ranks(self, host: str) -> dict[str, str]:
        """Make the place where the hosts of all ranks will meet; return the variables that name it to each of them.

        host: the address of this rank's node. LOOPBACK: all ranks are on this machine, and meet in a new file of the
        run's folder, MASTER_STORE, which is this user's alone. Else a socket listens on `host`, at MASTER_PORT.
        """
        if host == LOOPBACK:
            descriptor, file = tempfile.mkstemp(prefix="store_")
            os.close(descriptor)
            return {"MASTER_STORE": file, "MASTER_PORT": "0"}
        listener = listen(host)
        port: int = listener.getsockname()[1]
        os.environ["MASTER_LISTEN_FD"] = str(listener.detach())
        return {"MASTER_PORT": str(port)}

    def construct(self, role: str, env: dict[str, str], pickled: bytes, monitor: MonitorAddress) -> Coordinates:
        """Build the host from `dumps((host_class, args))`, with `env` in the environment.

        Returns its coordinates.
        """

        def build() -> Coordinates:
            with without_collections():
                host_class, args = pickle.loads(pickled)
                self._host = host_class(*args)
            coordinates: Coordinates = self._host.coordinates()
            return coordinates

        wait_for_memory(os.environ)
        os.environ.update(env)
        least_bytes = float(os.environ.get(HELD_BYTES, LEAST_HELD_BYTES))
        self._files = RankFiles(os.environ.get(RUN_ID, ""), os.environ.get("NODE_ID", ""), least_bytes)
        self._heartbeat = heartbeat = Heartbeat(self._rank, monitor)
        if DRAINS in os.environ:

            def note(number: int, frame: object) -> None:
                heartbeat.got_sigterm = True

            signal.signal(signal.SIGTERM, note)
        self._place = self._attempt(role, "__init__", build)
        return self._place

    def run(self, role: str, method: str, dispatch: Dispatch, payload: Payload) -> Answered | None:
        """Run a method; return its reply, or None if this rank is no collector."""
        args, kwargs = payload
        start = time.time()
        if role == HOST:
            answer = self._attempt("host", method, getattr(self._host, method), *args, **kwargs)
        else:
            answer = self._attempt(role, method, self._host.run, role, method, args, kwargs)
        counts = self._place is None or is_collector(dispatch, self._place)
        stop = time.time()
        return Answered(self._files.hold(answer), start, stop) if counts else None

    def _reply(self, message: bytes) -> bytes:
        name: str = "message"
        arguments: tuple[Any, ...] = ()
        try:
            name, arguments = loads(message, self._files)
            return dumps((None, getattr(self, name)(*arguments)))
        except RankFailed as error:
            return dumps((error.failure, None))
        except (Exception, SystemExit) as error:  # what cannot be unpickled here, or pickled for the client
            role, method = arguments[:2] if name == "run" else ("worker", name)
            return dumps((describe(error, rank=self._rank, role=role or "host", method=method), None))

    def _attempt(self, role: str, method: str, body: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        heartbeat = self._heartbeat
        if heartbeat is None:
            raise RuntimeError(f"{method} before the rank is constructed")
        if self._failure is None:
            show_title(f"{self._name}: {role}.{method}")
            try:
                with heartbeat.during(role, method):
                    return body(*args, **kwargs)
            except (Exception, SystemExit) as error:
                self._failure = describe(error, rank=self._rank, role=role, method=method)
        raise RankFailed(self._failure) from None


def show_title(title: str) -> None:
    """Show this process under a title in `ps` and its like, in the room of its command line."""
    start, stop = _command_line()
    ctypes.memmove(start, title.encode()[: stop - start - 1].ljust(stop - start, b"\0"), stop - start)


@functools.cache
def _command_line() -> tuple[int, int]:
    """Return where the kernel reads this process's command line: arg_start and arg_end of proc(5)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[45]), int(fields[46])


def main(descriptor: int) -> None:
    """Serve the pipe that a parent has left open, until it closes."""
    RankWorker().serve(Connection(descriptor))


if __name__ == "__main__":
    main(int(sys.argv[1]))
