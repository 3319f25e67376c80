"""The command that Ray starts a rank's process with, where ranks are forked: it asks the node's fork server for one.

    python -I -S fork_client.py KEY MODULE[,MODULE...] VARIABLE LIMIT_S default_worker.py ARGUMENT...

It starts the server where there is none, hands on its arguments, environment and open files, and lives as long as the
process that it was given: it ends as that one does, and that one ends with it. Where the server cannot serve within
LIMIT_S, because an import fails or takes too long, it becomes the process itself, which imports what it needs. VARIABLE
is not in the server's environment: whoever has it shares a fate that is not the server's.

Run as a file, without site-packages, it starts in 20 ms; it can import nothing of this package.
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
"""A server may end, because nobody needs it, just before one is asked for again."""

ROOM = "MEGATRON_RL_ROOM"
ROOM_BYTES = 4096
"""Of the server's environment, for what a rank's has more: a process shows the one in the place of the other."""

LENGTH = struct.Struct("!Q")
STATUS = struct.Struct("!i")
"""What the server answers: 0 when the process is there, and the status that it ended with."""


def address(key: str) -> str:
    """Where the server of this node listens: an abstract name, which goes when the server does."""
    return f"\0megatron_rl-{os.getuid()}-{key}-{os.getppid()}"


def is_ours(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end: abstract names are everybody's."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())


def start_server(name: str, modules: str, variable: str) -> subprocess.Popen[bytes]:
    """A process in a group of its own with this environment but for `variable`; it ends at once where there is one."""
    own = {key: value for key, value in os.environ.items() if key != variable}
    command = [sys.executable, "-m", "megatron_rl.cluster.fork_server", name.removeprefix("\0"), modules]
    own[ROOM] = "x" * ROOM_BYTES
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=own, process_group=0)


def connect(name: str, modules: str, variable: str, deadline: float) -> socket.socket | None:
    """The server's; None where there is none in time."""
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
    """Whether the server has forked a process with our arguments, environment, folder and files."""
    place = {"arguments": list(arguments), "variables": dict(os.environ), "folder": os.getcwd()}
    content = json.dumps(place).encode()
    with suppress(OSError):
        socket.send_fds(connection, [LENGTH.pack(len(content))], [0, 1, 2])
        connection.sendall(content)
        connection.settimeout(max(0.0, deadline - time.monotonic()))
        return connection.recv(STATUS.size) == STATUS.pack(0)
    return False


def main(key: str, modules: str, variable: str, limit_s: float, arguments: Sequence[str]) -> None:
    """Stand for the process until it ends; or become it."""
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
