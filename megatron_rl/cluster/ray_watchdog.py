"""The driver's watch over Ray's own processes. Without them its calls wait for a minute, and then Ray aborts it."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import psutil

from megatron_rl.cluster.child_processes import how_ended
from megatron_rl.errors import WorkerFailure

SERVER_PATIENCE_S = 40.0
"""Seconds that a cluster's server may be unreachable, as while it restarts. Ray aborts the driver after 60 s."""

LOOK_S = 2.0
LAST_RESORT_S, START_RESORT_S = 15.0, 5.0
"""Seconds that the driver has to clean up, because a call into Ray may never return; the latter while Ray starts."""

_START_LOOK_S = 0.2

_SIGNAL = signal.SIGRTMIN + 3


class DaemonMonitor:
    """A thread that ends the run when one of Ray's processes has ended; the main thread makes and stops it.

    It is made before Ray is started, as Ray waits a minute for a daemon that dies meanwhile, and looks for the daemons
    that this process starts until `watch` names those that the run needs. After a loss it calls `end_ranks` and the
    main thread leaves its `with` blocks with SystemExit; `lost` is the reason.

    end_ranks: ends the ranks alone. Ray's other processes continue as long as this one, which may be in a call into
    Ray: if the raylet ends, and it does if one of its agents does, Ray ends this process with code 1 and no message.
    """

    def __init__(self, end_ranks: Callable[[], None]) -> None:
        self.lost = ""
        self._end_ranks = end_ranks
        self._needed: Mapping[int, str] | None = None
        self._server: tuple[str, int] | None = None
        self._stopped = threading.Event()
        self._wake, self._woken = os.pipe()
        self._ends: dict[int, tuple[str, int]] = {}  # used by the thread alone, until it has ended
        self._interrupts = threading.current_thread() is threading.main_thread()
        if self._interrupts:
            signal.signal(_SIGNAL, self._leave)
        self._thread = threading.Thread(target=self._run, name="daemons", daemon=True)
        self._thread.start()

    def watch(self, daemons: Mapping[int, str], server: tuple[str, int] | None) -> None:
        """Say that Ray has started.

        daemons: pid -> name. server: (host, port) of the server of a cluster that was joined; None: it is a daemon
        here.
        """
        self._server, self._needed = server, daemons

    def stop(self) -> str:
        """Stop the thread; return the loss, "" if nothing was lost. Call it before Ray is shut down."""
        self._stopped.set()
        os.close(self._woken)
        self._thread.join()
        if self._interrupts:
            signal.signal(_SIGNAL, signal.SIG_DFL)
        for descriptor in (self._wake, *self._ends):
            os.close(descriptor)
        return self.lost

    def _run(self) -> None:
        self.lost = self._await_loss()
        if not self.lost:
            return
        self._end_ranks()
        if self._interrupts:
            main = threading.main_thread().ident
            assert main is not None  # it runs
            signal.pthread_kill(main, _SIGNAL)
        if not self._stopped.wait(START_RESORT_S if self._needed is None else LAST_RESORT_S):
            with suppress(OSError):
                os.write(2, f"\n{self.lost}\n".encode())
            os._exit(WorkerFailure.exit_code)

    def _await_loss(self) -> str:
        """Wait for a loss and return it; "" when the monitor was stopped."""
        answered, has_started = time.monotonic(), False
        while True:
            # Ray keeps this thread waiting while it starts a daemon: look once more, as its failure may have a cause.
            looks_last = self._stopped.is_set()
            if not has_started:
                has_started = self._needed is not None
                for pid, name in (self._needed or children()).items():
                    if not self._has_pidfd(pid, name):
                        return _sentence(f"Ray's {name} (process {pid}) has ended")
            limit = _START_LOOK_S if not has_started else None if self._server is None else LOOK_S
            ready, _, _ = select.select([self._wake, *self._ends], [], [], limit)
            if has_started and self._stopped.is_set():
                return ""
            for descriptor in set(ready) - {self._wake}:
                name, pid = self._ends[descriptor]
                return _sentence(f"Ray's {name} (process {pid}) {_how(descriptor)}")
            if looks_last:
                return ""
            if self._server is None or _answers(self._server):
                answered = time.monotonic()
            elif time.monotonic() - answered > SERVER_PATIENCE_S:
                host, port = self._server
                return _sentence(f"Ray's server at {host}:{port} has not responded for {SERVER_PATIENCE_S:g} s")

    def _has_pidfd(self, pid: int, name: str) -> bool:
        """Whether a daemon is watched, from here on if not before; it is not if it has gone."""
        if pid not in {watched for _, watched in self._ends.values()}:
            try:
                self._ends[os.pidfd_open(pid)] = (name, pid)
            except ProcessLookupError:
                return False
        return True

    def _leave(self, number: int, frame: object) -> None:
        if not self._stopped.is_set():
            raise SystemExit(WorkerFailure.exit_code)


def children() -> dict[int, str]:
    """Return pid -> name of the necessary Ray processes that this process has started."""
    names = {}
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has gone meanwhile
            names[child.pid] = child.name()
    return {pid: name for pid, name in names.items() if name in ("gcs_server", "raylet")}


def family() -> set[psutil.Process]:
    """Return the necessary Ray processes that this process has started, and all below them: agents, workers."""
    processes = set()
    for pid in children():
        with suppress(psutil.Error):  # it has gone meanwhile
            daemon = psutil.Process(pid)
            processes |= {daemon, *daemon.children(recursive=True)}
    return processes


def owner(path: str) -> int:
    """Return the pid of the process that listens on a Unix socket; 0 where it is in another container."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(path)
        pid: int
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid


def _how(descriptor: int) -> str:
    """Say how the process of a pidfd has ended; only its parent learns the details."""
    with suppress(ChildProcessError):
        ended = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return how_ended(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
    return "has ended"


def _sentence(what: str) -> str:
    return (
        f"{what}, and the run cannot continue without it. If nobody stopped it, check whether memory ran out (dmesg). "
        "The same "
        "command resumes from the newest checkpoint"
    )


def _answers(server: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(server, timeout=LOOK_S):
            return True
    except OSError:
        return False
