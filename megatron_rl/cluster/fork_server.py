"""A process that imports the modules of ranks once and forks a process for each rank of its node.

    python -m megatron_rl.cluster.fork_server NAME MODULE[,MODULE...]

It listens at the abstract address NAME; `fork_client.py` starts it and documents the messages. A child gets the
arguments, environment, folder and files of its client, and is killed when the client ends. The server ends when it has
no child and has had no request for IDLE_S.

It is for ranks on CPUs: a child of a process that has used a GPU cannot use that GPU.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from megatron_rl.cluster import fork_client
from megatron_rl.cluster.fork_client import LENGTH, STATUS, is_ours
from megatron_rl.cluster.leftovers import REPLICA
from megatron_rl.cluster.loading import without_collections

IDLE_S = 5.0
REQUEST_LIMIT_S = 10.0
"""Seconds to receive a request, which the client sends at once."""

READY_LIMIT_S = 40.0
"""Seconds that a rank waits for the imports: Ray gives up on a process that has not reported within 60 s."""

ALWAYS = ("ray._private.worker",)


def fork_command(modules: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return the command that Ray runs instead of Python, to fork ranks from a server that has imported `modules`.

    Ranks on one node with equal `modules` and `variables` share a server. variables: those that the modules read on
    import, and one that differs between runs.
    """
    key = sha256(json.dumps([list(modules), sorted(variables.items())]).encode()).hexdigest()[:16]
    client = [sys.executable, "-I", "-S", fork_client.__file__]
    return shlex.join([*client, key, ",".join([*ALWAYS, *modules]), REPLICA, str(READY_LIMIT_S)])


class ForkRequest(NamedTuple):
    """A client's request: a file or `-m MODULE` with its arguments, its environment, and its folder."""

    arguments: list[str]
    variables: dict[str, str]
    folder: str


@dataclass
class Child:
    """A forked process and its client."""

    pid: int
    process: int  # a pidfd, readable when the child has ended
    client: socket.socket


def receive(client: socket.socket) -> tuple[ForkRequest, list[int]] | None:
    """Receive a request and the client's standard files; None if the client has ended meanwhile."""
    files: list[int] = []
    client.settimeout(REQUEST_LIMIT_S)
    with suppress(OSError):
        length, files, _, _ = socket.recv_fds(client, LENGTH.size, 3)
        if len(length) == LENGTH.size:
            with client.makefile("rb") as stream:
                content = stream.read(LENGTH.unpack(length)[0])
            if len(content) == LENGTH.unpack(length)[0]:
                return ForkRequest(**json.loads(content)), files
    for file in files:
        os.close(file)
    return None


class ForkServer:
    """Forks children on request and ends them with their clients."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._children: list[Child] = []

    def serve(self) -> ForkRequest | None:
        """Fork until the server is idle. In each child return the request, with its files open; in the server None."""
        while ready := self._selector.select(None if self._children else IDLE_S):
            for key, _ in ready:
                if isinstance(key.data, Child):
                    self._end(key.data, key.fd == key.data.process)
                elif request := self._accept():
                    return request
        return None

    def _accept(self) -> ForkRequest | None:
        client, _ = self._listener.accept()
        received = receive(client) if is_ours(client) else None
        if received is None:
            client.close()
            return None
        request, files = received
        pid = os.fork()
        if pid == 0:
            # Its own group, because Ray kills the group of a process that has ended. Not its own session, because Linux
            # shares the cores between sessions: ranks that spin in vLLM's all-reduce would take 20 times as long.
            os.setpgid(0, 0)
            self._let_go(client)
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            return request
        for file in files:
            os.close(file)
        child = Child(pid, os.pidfd_open(pid), client)
        self._children.append(child)
        self._selector.register(child.process, selectors.EVENT_READ, child)
        self._selector.register(client, selectors.EVENT_READ, child)
        with suppress(OSError):  # the client has ended; the selector reports that too
            client.sendall(STATUS.pack(0))
        return None

    def _end(self, child: Child, has_ended: bool) -> None:
        """After the end of a child, tell its client; after the end of a client, kill its child."""
        if child not in self._children:
            return  # both have ended at once
        if not has_ended:
            self._selector.unregister(child.client)
            os.kill(child.pid, signal.SIGKILL)
            return
        _, status = os.waitpid(child.pid, 0)
        with suppress(OSError):
            child.client.sendall(STATUS.pack(status))
        with suppress(KeyError):  # the client ended first
            self._selector.unregister(child.client)
        self._selector.unregister(child.process)
        self._close(child)
        self._children.remove(child)

    def _let_go(self, client: socket.socket) -> None:
        """In a child: close the server's descriptors. The server keeps its own registrations."""
        self._selector.close()
        self._listener.close()
        client.close()
        for child in self._children:
            self._close(child)

    def _close(self, child: Child) -> None:
        os.close(child.process)
        child.client.close()


def show_environment(variables: Mapping[str, str]) -> None:
    """Write `variables` to the memory where other processes read this one's environment.

    Raises ValueError where there is no room. os.environ must have been filled anew, so that nothing points there.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # proc(5): env_start, env_end
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())
    if len(block) > end - start:
        raise ValueError(f"the environment has {len(block)} bytes, and there is room for {end - start}")
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


def become(request: ForkRequest) -> None:
    """Run a child's request, as `python FILE ARGUMENT...` or `python -m MODULE ARGUMENT...` would."""
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.variables)
    show_environment(request.variables)
    first, *rest = request.arguments
    if first == "-m":
        sys.argv, sys.path[0] = rest, request.folder
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = request.arguments, str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


def main(name: str, modules: Sequence[str]) -> None:
    """Import the modules, serve, and run the request in each child."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        return  # another server was faster
    # Clients wait in the queue during the imports.
    listener.listen(socket.SOMAXCONN)
    with without_collections():
        for module in modules:
            importlib.import_module(module)
    # A reader of a client's output waits until no process has that file open.
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    request = ForkServer(listener).serve()
    if request is not None:
        become(request)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","))
