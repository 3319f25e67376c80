"""The command with which Ray starts a rank's process where ranks are forked: it asks the node's fork server for one.

    python -I -S fork_client.py KEY MODULE[,MODULE...] VARIABLE LIMIT_S default_worker.py ARGUMENT...

It starts the server if there is none, and passes on its arguments, environment and open files. It and the forked
process end together, with the same status. If the server cannot serve within LIMIT_S, because an import fails or takes
too long, this command becomes the process itself, which imports its modules. VARIABLE is left out of the server's
environment: it names the replica that a process ends with, and the server must outlive replicas.

Run as a file, without site-packages, it starts in 20 ms; it cannot import this package.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

MOST_STARTS = 3
"""A server that is idle may end just before the next request."""

ROOM = "MEGATRON_RL_ROOM"
ROOM_BYTES = 4096
"""Spare room in the server's environment. A forked rank overwrites that memory with its own, larger environment."""

LENGTH = struct.Struct("!Q")
STATUS = struct.Struct("!i")
"""The server's answers: 0 when the process is forked, then the status with which it ended."""


def address(key: str) -> str:
    """Return the abstract socket name of this node's server, which vanishes with the server."""
    return f"\0megatron_rl-{os.getuid()}-{key}-{os.getppid()}"


def is_ours(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end; any user can listen on an abstract name."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())


def start_server(name: str, modules: str, variable: str) -> subprocess.Popen[bytes]:
    """Start a server in its own process group, without `variable`; it ends at once if another server is running."""
    own = {key: value for key, value in os.environ.items() if key != variable}
    command = [sys.executable, "-m", "megatron_rl.cluster.fork_server", name.removeprefix("\0"), modules]
    own[ROOM] = "x" * ROOM_BYTES
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=own, process_group=0)


def connect(name: str, modules: str, variable: str, deadline: float) -> socket.socket | None:
    """Connect to the server; None if there is none in time."""
    connection = socket.socket(socket.AF_UNIX)
    started: list[subprocess.Popen[bytes]] = []
    while time.monotonic() < deadline:
        try:
            connection.connect(name)
        except ConnectionRefusedError:
            if not started or started[-1].poll() is not None:
                if len(started) == MOST_STARTS:
                    return None
                started.append(start_server(name, modules, variable))
            time.sleep(0.02)
        else:
            return connection if is_ours(connection) else None
    return None


def ask(connection: socket.socket, arguments: Sequence[str], deadline: float) -> bool:
    """Ask for a process with these arguments and this process's environment, folder and files; whether it is forked."""
    place = {"arguments": list(arguments), "variables": dict(os.environ), "folder": os.getcwd()}
    content = json.dumps(place).encode()
    with suppress(OSError):
        socket.send_fds(connection, [LENGTH.pack(len(content))], [0, 1, 2])
        connection.sendall(content)
        connection.settimeout(max(0.0, deadline - time.monotonic()))
        return connection.recv(STATUS.size) == STATUS.pack(0)
    return False


def main(key: str, modules: str, variable: str, limit_s: float, arguments: Sequence[str]) -> None:
    """Wait until the forked process ends and end in the same way, or become the process."""
    deadline = time.monotonic() + limit_s
    connection = connect(address(key), modules, variable, deadline)
    if connection is None or not ask(connection, arguments, deadline):
        os.execv(sys.executable, [sys.executable, *arguments])
    connection.settimeout(None)
    answer = connection.recv(STATUS.size)
    status = STATUS.unpack(answer)[0] if len(answer) == STATUS.size else signal.SIGKILL
    if os.WIFSIGNALED(status):
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 255)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5:])
