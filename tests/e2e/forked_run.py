"""The command line in a child of the server that ranks are forked from, which has imported all that a run needs.

A run in one process spends two thirds of its time on imports; `test_unread_output.py` has them, as users do.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

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
    from megatron_rl.cluster import supervisor_client
    from megatron_rl.roles.environment import worker_environment

    if "--local" not in arguments:
        forked = ForkedSupervisor()
        supervisor_client.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": forked.start})
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


class ForkedSupervisor:
    """The supervisor of the run that this process becomes, forked from it before it has threads.

    A run spends half of its CPU seconds on what a supervisor imports, and the server has imported it. Tests that name
    a command of their own, and tests/cluster, have supervisors as users have them. It has what `supervisor_client` asks
    of a `subprocess.Popen`.
    """

    def __init__(self) -> None:
        self._orders, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.returncode: int | None = None
        self._stdin = -1
        self.pid = os.fork()
        if self.pid == 0:
            self._orders.close()
            be_supervisor(orders)
        orders.close()

    def start(
        self, command: list[str], *, stdout: int, env: Mapping[str, str], pass_fds: Sequence[int], **_: Any
    ) -> ForkedSupervisor:
        """Let it begin, as `subprocess.Popen` would start it: with a pipe as its stdin, in a session of its own."""
        assert self._stdin < 0, "a run has one supervisor"
        stdin, self._stdin = os.pipe()
        order = json.dumps([command[3:], dict(env)]).encode()
        socket.send_fds(self._orders, [order], [stdin, stdout, *pass_fds])
        self._orders.close()
        os.close(stdin)
        return self

    def poll(self) -> int | None:
        """Return the exit code of a process that has ended."""
        if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def communicate(self, timeout: float) -> None:
        """Close its stdin and wait for its end; raises subprocess.TimeoutExpired."""
        os.close(self._stdin)
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("supervisor", timeout)
            time.sleep(0.01)


def be_supervisor(orders: socket.socket) -> NoReturn:
    """Wait for an order, and do what `python -m megatron_rl.cluster.supervisor` does; end if none comes."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.setsid()
        order, descriptors, _, _ = socket.recv_fds(orders, 1 << 20, 8)
        orders.close()
        if not order:
            os._exit(0)
        (name, modules), variables = json.loads(order)
        stdin, log, *_ = descriptors  # the others stay open, as what is passed to a new program
        for source, target in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(stdin)
        os.close(log)
        os.environ.clear()
        os.environ |= variables
        show_environment(variables)
        sys.path[:] = [os.getcwd(), *variables["PYTHONPATH"].split(os.pathsep)]
        tempfile.tempdir = None
        let_ray_read_again()
        import torch

        from megatron_rl.cluster import supervisor
        from megatron_rl.cluster.rank_worker import show_title

        show_title(f"{sys.executable} -m {supervisor.__name__} {name}")
        if "OMP_NUM_THREADS" in variables:
            torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
        supervisor.main(name, [module for module in modules.split(",") if module])
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def show_environment(variables: Mapping[str, str]) -> None:
    """Show others this environment as that of this process and of all that it forks: by it they find a run's processes.

    It takes the room of the environment that the server was started with, so the marks come first.
    """
    start, stop = (int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    first = sorted(variables.items(), key=lambda item: not item[0].startswith("MEGATRON_RL_"))
    block = b"\0".join(f"{name}={value}".encode() for name, value in first)[: stop - start - 1]
    assert all(f"{name}={value}".encode() in block for name, value in first if name.startswith("MEGATRON_RL_"))
    ctypes.memmove(start, block.ljust(stop - start, b"\0"), stop - start)
