"""The command line in a child of the server that ranks are forked from, which has imported all that a run needs.

A run in one process spends two thirds of its time on imports; `test_unread_output.py` has them, as users do.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ranks import fork_server

LIMIT = 300.0
"""Seconds that a test waits for what a busy machine does later; none waits so long on an idle one."""


class ForkedRun:
    """As a `subprocess.Popen` of `python -m megatron_rl ARGUMENTS`, in a session of its own, stderr with stdout.

    variables: of its environment, beside this process's. typed: a file that is its stdin, instead of none.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        cwd: Path,
        variables: Mapping[str, str],
        output: Path,
        typed: Path = Path(os.devnull),
    ) -> None:
        output.write_bytes(b"")  # there at once, as a typed command's
        # Not what Ray has left behind here, where other tests have used it: its library in the server has read nothing.
        place = (list(arguments), str(cwd), typed_paths(cwd), without_ray() | dict(variables), str(output), str(typed))
        # Not a daemon: those may not start processes of their own.
        self._process = fork_server().Process(target=command_line, args=place, daemon=False)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = LIMIT) -> int:
        """The exit code; raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("megatron_rl", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Nothing, where it has just ended, as a Popen does."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def without_ray() -> dict[str, str]:
    """This process's environment, without Ray's variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


@functools.cache
def typed_paths(cwd: Path) -> list[str]:
    """Where Python looks for modules when it is started in `cwd`."""
    asked = [sys.executable, "-c", "import sys; print(*sys.path[1:], sep='\\n')"]
    found = subprocess.run(asked, cwd=cwd, capture_output=True, text=True, check=True).stdout
    return [str(cwd), *found.splitlines()[1:]]


def let_ray_read_again() -> None:
    """What the server's Ray library has read of its own environment when it was imported: its settings and a token."""
    from ray._raylet import AuthenticationTokenLoader, Config

    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")


def command_line(
    arguments: list[str], cwd: str, paths: list[str], variables: dict[str, str], output: str, typed: str
) -> None:
    """Where the child begins; it exits as `python -m megatron_rl` does."""
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.dup2(os.open(typed, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has given it another
    os.chdir(cwd)
    os.environ.clear()
    os.environ |= variables
    tempfile.tempdir = None  # the server has its own
    sys.path[:] = paths
    sys.argv = ["megatron_rl", *arguments]
    let_ray_read_again()
    import torch

    from megatron_rl.cli import main
    from megatron_rl.roles.environment import worker_environment

    # The server's libraries have begun with a rank's share of the cores; this run is alone.
    torch.set_num_threads(int(worker_environment("cpu", ranks_per_node=1)["OMP_NUM_THREADS"]))
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
