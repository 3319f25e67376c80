"""The guessing game behind a server of OpenEnv's."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVER = Path(__file__).with_name("openenv_guess.py")
URL = "http://127.0.0.1:{}"


@contextmanager
def served(python: str, url: str | None = None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The server's URL and process. python: the interpreter that has its package. url: of a server that has gone, in
    whose place it is.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] if url is None else int(url.rpartition(":")[2])
    server = subprocess.Popen([python, str(SERVER), str(port)])
    try:
        for _ in range(600):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield URL.format(port), server
    finally:
        server.kill()
        server.wait()
