"""A run's supervisor on one node: a process that starts the run's ranks there and ends all that the run leaves.

    python -m megatron_rl.cluster.supervisor NAME MODULE[,MODULE...]     with RUN_ID in the environment

Clients connect to its socket, NAME in the run's scratch folder: the driver, and on a node of a cluster that was joined
the agents of pools. It imports the modules once and forks a process for each rank; without modules, as on GPUs, each
rank becomes a Python of its own. It kills a client's ranks when the client ends. When the driver, or the last client,
has ended, it kills every process of the run, on the driver's node, or all that come from it, on another, removes the
scratch folder, and ends.

A client's requests, one message each: {"start": variables, "log": file} with the rank's end of a pipe; {"owns": true}
of the driver; {"watch": pids} of processes that end with the client; {"keeps": true} before a client that removes the
scratch folder itself ends. Answers: {"pid": pid} to each start, in order; {"ended": pid, "status": as of `os.waitpid`}.

Nothing it does needs the driver: the kernel kills its ranks when it dies, and a killed driver's ranks do not outlive
their client's socket.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, NoReturn

import psutil

from megatron_rl.cluster.child_processes import adopt_orphans, die_with, kill_group
from megatron_rl.cluster.loading import COMPILED, remove_if_empty, without_collections
from megatron_rl.cluster.scratch import Scratch
from megatron_rl.cluster.stale_processes import RUN_ID, descendants, end, living, processes_with

SUPERVISOR = "MEGATRON_RL_SUPERVISOR"
"""The environment variable with the supervisor that a process comes from, directly or not."""

LARGEST = 128 << 10
"""Bytes of a request: most of it is a rank's environment."""

RANK_WORKER = "megatron_rl.cluster.rank_worker"

STDIN, STDOUT, STDERR = 0, 1, 2


class StartRequest(NamedTuple):
    """A rank to start. pipe: the descriptor of its end."""

    variables: dict[str, str]
    log: str
    pipe: int


@dataclass(eq=False)
class Client:
    """A connected process. process: its pidfd, as children of the client may hold its socket open."""

    connection: socket.socket
    process: int
    watched: list[psutil.Process] = field(default_factory=list)
    owns_run: bool = False
    keeps_folder: bool = False

    @classmethod
    def of(cls, connection: socket.socket) -> Client:
        """Raises ProcessLookupError where it has ended."""
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return cls(connection, os.pidfd_open(pid))

    def say(self, answer: dict[str, int]) -> None:
        """Send a reply; a client that has ended gets none."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(answer).encode())


class Supervisor:
    """Starts ranks on request until no client is left. starter: readable once the process that started it is gone.

    owns_run, keeps_folder: as the driver has said, where it was a client.
    """

    def __init__(self, listener: socket.socket, starter: int) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._starter: int | None = starter
        self._selector.register(starter, selectors.EVENT_READ)
        self._clients: list[Client] = []
        self._ranks: dict[int, tuple[int, Client]] = {}  # pid -> its pidfd, who asked for it
        self._is_over = False
        self.owns_run = self.keeps_folder = False

    def serve(self) -> StartRequest | None:
        """Serve until the last client has ended. In each rank's process return its request; here return None."""
        while not self._is_over and (self._clients or self._starter is not None):
            for key, _ in self._selector.select():
                if isinstance(key.data, Client):
                    if key.fd == key.data.process:
                        self._lose(key.data)
                    elif request := self._receive(key.data):
                        return request
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.fd == self._starter:
                    self._selector.unregister(key.fd)
                    self._starter = None
            self._reap()
        return None

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            client = Client.of(connection)
        except ProcessLookupError:
            connection.close()
            return
        self._clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._selector.register(client.process, selectors.EVENT_READ, client)

    def _receive(self, client: Client) -> StartRequest | None:
        if client not in self._clients:
            return None  # lost by an earlier event
        content, files = b"", list[int]()
        with suppress(OSError):
            content, files, _, _ = socket.recv_fds(client.connection, LARGEST, 1)
        if not content:
            self._lose(client)
            return None
        request = json.loads(content)
        if "watch" in request:
            client.watched += [process for process in psutil.process_iter() if process.pid in request["watch"]]
        client.owns_run |= "owns" in request
        client.keeps_folder |= "keeps" in request
        return self._start(StartRequest(request["start"], request["log"], *files), client) if files else None

    def _start(self, request: StartRequest, client: Client) -> StartRequest | None:
        pid = os.fork()
        if pid == 0:
            self._let_go()
            return request
        # Its own group, which ends with it. Not its own session, because Linux shares the cores between sessions: ranks
        # that spin in vLLM's all-reduce would take 20 times as long.
        with suppress(OSError):  # it has done so itself, and may have become another program
            os.setpgid(pid, pid)
        os.close(request.pipe)
        process = os.pidfd_open(pid)
        self._ranks[pid] = process, client
        self._selector.register(process, selectors.EVENT_READ)
        client.say({"pid": pid})
        return None

    def _lose(self, client: Client) -> None:
        """End the ranks and the watched processes of a client that has ended."""
        if client not in self._clients:
            return
        self._clients.remove(client)
        for descriptor in (client.connection, client.process):
            self._selector.unregister(descriptor)
        client.connection.close()
        os.close(client.process)
        for pid, (_, owner) in self._ranks.items():
            if owner is client:
                kill_group(pid)
        end(lambda: living(client.watched), patience_s=0.0)
        self._is_over |= client.owns_run
        self.owns_run |= client.owns_run
        self.keeps_folder |= client.keeps_folder

    def _reap(self) -> None:
        """Tell the clients which ranks have ended; orphans of ranks are this process's children, too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._ranks:
                process, client = self._ranks.pop(pid)
                self._selector.unregister(process)
                os.close(process)
                kill_group(pid)
                client.say({"ended": pid, "status": status})

    def _let_go(self) -> None:
        """In a rank's process: close the supervisor's descriptors."""
        self._selector.close()
        self._listener.close()
        for client in self._clients:
            client.connection.close()
            os.close(client.process)
        for process, _ in self._ranks.values():
            os.close(process)


def load(modules: Sequence[str], starter: int, scratch: Scratch) -> None:
    """Import the modules, and what serves a rank's pipe; a module that fails is left to the ranks, which report it. End
    if the starter ends.
    """
    loaded, is_loaded = os.pipe()
    watch = threading.Thread(target=_end_with_starter, args=(starter, loaded, scratch), daemon=True)
    watch.start()
    with without_collections():
        for module in (RANK_WORKER, *modules):
            with suppress(Exception):
                importlib.import_module(module)
    os.close(is_loaded)
    watch.join()  # no thread may run when ranks are forked
    os.close(loaded)


def _end_with_starter(starter: int, loaded: int, scratch: Scratch) -> None:
    ready, _, _ = select.select([starter, loaded], [], [])
    if loaded not in ready:
        finish(scratch, owns_run=False, keeps_folder=False)


def finish(scratch: Scratch, owns_run: bool, keeps_folder: bool) -> NoReturn:
    """Kill all processes of the run, or of this node, but this one; remove the scratch folder unless a client will."""
    own = os.getpid()
    mark = (scratch.run_id, RUN_ID) if owns_run else (os.environ[SUPERVISOR], SUPERVISOR)
    end(lambda: [*living(descendants()), *(left for left in processes_with(*mark) if left.pid != own)])
    if not keeps_folder:
        scratch.remove(keep_logs=True)
        compiled = os.environ.get(COMPILED, "")
        if compiled.endswith(f"torchinductor_{os.getuid()}"):  # else the user has named it
            remove_if_empty(compiled)
    os._exit(0)


def become(request: StartRequest, supervisor: int, is_loaded: bool) -> NoReturn:
    """Be a rank: serve the pipe of the request, in this process or, if nothing is loaded, as a Python of its own."""
    from megatron_rl.cluster.rank_worker import RankWorker

    with suppress(OSError):
        os.setpgid(0, 0)
    die_with(supervisor)
    log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, STDIN), (log, STDOUT), (log, STDERR)):
        os.dup2(source, target)
    os.environ |= request.variables
    tempfile.tempdir = None
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank {request.variables['RANK']}")
    if not is_loaded:
        os.set_inheritable(request.pipe, True)
        # The last word makes room for the title that `ps` shows.
        os.execv(sys.executable, [sys.executable, "-m", RankWorker.__module__, str(request.pipe), "-" * 80])
    faulthandler.enable()
    RankWorker().serve(Connection(request.pipe))
    os._exit(0)


def main(name: str, modules: Sequence[str]) -> None:
    """Listen, import the modules, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    scratch = Scratch.join(os.environ[RUN_ID])
    os.environ[SUPERVISOR] = f"{scratch.run_id}/{name}"
    listener, path = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), scratch.folder / name
    path.unlink(missing_ok=True)  # of one that has ended: who starts a supervisor has claimed the name
    listener.bind(str(path))
    listener.listen(socket.SOMAXCONN)
    if modules:
        load(modules, STDIN, scratch)
    supervisor, own = Supervisor(listener, STDIN), os.getpid()
    request = supervisor.serve()
    if request is not None:
        become(request, own, bool(modules))
    finish(scratch, supervisor.owns_run, supervisor.keeps_folder)


if __name__ == "__main__":
    main(sys.argv[1], [module for module in sys.argv[2].split(",") if module])
