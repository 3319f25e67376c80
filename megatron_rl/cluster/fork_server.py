"""A process that imports once what ranks need, and forks into every rank of its node that is asked for.

    python -m megatron_rl.cluster.fork_server NAME MODULE[,MODULE...]

It listens at the abstract address NAME; `fork_client.py` starts it and says what it sends. A child gets the arguments,
the environment, the folder and the files of its client, and is killed when the client goes. The server ends when it has
no child and nobody has asked for IDLE_S.

For ranks on CPUs: a child of a process that has touched a GPU cannot use it.
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
"""A client sends its whole request at once."""

READY_LIMIT_S = 40.0
"""For a rank to wait until all is imported: Ray gives up on a process that has not reported within 60 s."""

ALWAYS = ("ray._private.worker",)


def fork_command(modules: Sequence[str], variables: Mapping[str, str]) -> str:
    """What Ray is to run instead of Python, so that ranks with these `variables` come out of a server with `modules`.

    Ranks share a server where both agree, and the node: `variables` are those that modules read when they are imported,
    and one that no other run has.
    """
    key = sha256(json.dumps([list(modules), sorted(variables.items())]).encode()).hexdigest()[:16]
    client = [sys.executable, "-I", "-S", fork_client.__file__]
    return shlex.join([*client, key, ",".join([*ALWAYS, *modules]), REPLICA, str(READY_LIMIT_S)])


class ForkRequest(NamedTuple):
    """What a client asks for: a file or `-m MODULE` with its arguments, its environment, and its folder."""

    arguments: list[str]
    variables: dict[str, str]
    folder: str


@dataclass
class Child:
    """A process of ours, and the client that stands for it."""

    pid: int
    process: int  # readable when the child has ended
    client: socket.socket


def receive(client: socket.socket) -> tuple[ForkRequest, list[int]] | None:
    """A request and the client's standard files; None where it has gone meanwhile."""
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
    """The children of this process, and their clients."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._children: list[Child] = []

    def serve(self) -> ForkRequest | None:
        """In every child what was asked for it, its files in their places; in the server None, when nobody needs it."""
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
            # Ray kills the group of a process that has ended. Not a session of its own: Linux would share out the cores
            # to sessions, and ranks that wait for each other in vLLM's all-reduce, which spins, take 20 times as long.
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
        with suppress(OSError):  # it has gone, which the selector says, too
            client.sendall(STATUS.pack(0))
        return None

    def _end(self, child: Child, has_ended: bool) -> None:
        """The child has ended, and so will its client; or the client has gone, and the child must."""
        if child not in self._children:
            return  # both have ended at once
        if not has_ended:
            self._selector.unregister(child.client)
            os.kill(child.pid, signal.SIGKILL)
            return
        _, status = os.waitpid(child.pid, 0)
        with suppress(OSError):
            child.client.sendall(STATUS.pack(status))
        with suppress(KeyError):  # it has gone before
            self._selector.unregister(child.client)
        self._selector.unregister(child.process)
        self._close(child)
        self._children.remove(child)

    def _let_go(self, client: socket.socket) -> None:
        """In a child: nothing of the server's stays open. What is registered is the server's own, and stays so."""
        self._selector.close()
        self._listener.close()
        client.close()
        for child in self._children:
            self._close(child)

    def _close(self, child: Child) -> None:
        os.close(child.process)
        child.client.close()


def show_environment(variables: Mapping[str, str]) -> None:
    """Put `variables` where other processes read this one's environment; raises ValueError where there is no room.

    Nothing here may point there any more: os.environ must have been filled anew.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # proc(5): env_start, env_end
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())
    if len(block) > end - start:
        raise ValueError(f"the environment has {len(block)} bytes, and there is room for {end - start}")
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


def become(request: ForkRequest) -> None:
    """Run what a child was asked for, as `python FILE ARGUMENT...` or `python -m MODULE ARGUMENT...` would."""
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
    """Import, serve, and in each child run its file."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        return  # another server was faster
    # Clients wait in line meanwhile.
    listener.listen(socket.SOMAXCONN)
    with without_collections():
        for module in modules:
            importlib.import_module(module)
    # Whoever reads what a client prints waits until nobody has that open any more.
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    request = ForkServer(listener).serve()
    if request is not None:
        become(request)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","))
