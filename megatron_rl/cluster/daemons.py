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

from megatron_rl.errors import WorkerFailure

SERVER_PATIENCE_S = 40.0
"""Seconds that a cluster's server may be unreachable, as while it restarts. Ray aborts the driver after 60 s."""

LOOK_S = 2.0
LAST_RESORT_S = 15.0
"""Seconds that the driver has to clean up, because a call into Ray may never return."""

_SIGNAL = signal.SIGRTMIN + 3


class DaemonMonitor:
    """A thread that ends the run when one of Ray's processes has ended; the main thread makes and stops it.

    daemons: pid -> name. server: (host, port) of the server of a cluster that was joined; None: it is a daemon here.
    on_loss: called first. Then the main thread leaves its `with` blocks with SystemExit; `lost` is the reason.
    """

    def __init__(self, daemons: Mapping[int, str], server: tuple[str, int] | None, on_loss: Callable[[], None]) -> None:
        self.lost = ""
        self._server, self._on_loss = server, on_loss
        self._stopped = threading.Event()
        self._wake, self._woken = os.pipe()
        self._ends: dict[int, tuple[str, int]] = {}
        for pid, name in daemons.items():
            with suppress(ProcessLookupError):
                self._ends[os.pidfd_open(pid)] = (name, pid)
        self._interrupts = threading.current_thread() is threading.main_thread()
        if self._interrupts:
            signal.signal(_SIGNAL, self._leave)
        self._thread = threading.Thread(target=self._run, name="daemons", daemon=True)
        self._thread.start()

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
        self._on_loss()
        if self._interrupts:
            main = threading.main_thread().ident
            assert main is not None  # it runs
            signal.pthread_kill(main, _SIGNAL)
        if not self._stopped.wait(LAST_RESORT_S):
            with suppress(OSError):
                os.write(2, f"\n{self.lost}\n".encode())
            os._exit(WorkerFailure.exit_code)

    def _await_loss(self) -> str:
        """Wait for a loss and return it; "" when the monitor was stopped."""
        answered = time.monotonic()
        while True:
            ready, _, _ = select.select([self._wake, *self._ends], [], [], None if self._server is None else LOOK_S)
            if self._stopped.is_set():
                return ""
            for descriptor in ready:
                name, pid = self._ends[descriptor]
                return _sentence(f"Ray's {name} (process {pid}) {_how(descriptor)}")
            if self._server is None or _answers(self._server):
                answered = time.monotonic()
            elif time.monotonic() - answered > SERVER_PATIENCE_S:
                host, port = self._server
                return _sentence(f"Ray's server at {host}:{port} has not answered for {SERVER_PATIENCE_S:g} s")

    def _leave(self, number: int, frame: object) -> None:
        if not self._stopped.is_set():
            raise SystemExit(WorkerFailure.exit_code)


def children() -> dict[int, str]:
    """Return pid -> name of the necessary Ray processes that this process has started."""
    names = {child.pid: child.name() for child in psutil.Process().children()}
    return {pid: name for pid, name in names.items() if name in ("gcs_server", "raylet")}


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
            if ended.si_code == os.CLD_EXITED:
                return f"exited with code {ended.si_status}"
            return f"was killed by {signal.Signals(ended.si_status).name}"
    return "has ended"


def _sentence(what: str) -> str:
    return (
        f"{what}, and the run cannot go on without it; if nobody did that, look for a lack of memory (dmesg). The same "
        "command again goes on from the newest checkpoint"
    )


def _answers(server: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(server, timeout=LOOK_S):
            return True
    except OSError:
        return False
