"""Ranks that are forked: a child is what its client would have been, they end together, and nothing stays.

Not caught: a library that does not bear to be imported before a fork. Runs through Ray, all forked, would show it.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from replica_cluster import GONE_S, eventually, lives
from toy_worker import ToyWorker

from megatron_rl.cluster import fork_server
from megatron_rl.cluster.fork_server import fork_command
from megatron_rl.cluster.hosting import PoolOptions
from megatron_rl.cluster.leftovers import REPLICA, RUN_ID, end, processes_with
from megatron_rl.cluster.ray_pool import RayPool
from megatron_rl.cluster.resource_pool import ResourcePool
from megatron_rl.errors import WorkerFailure
from megatron_rl.roles.preloaded import preloaded

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

IMPORTED = """
import os, pathlib, time
with open(os.environ["IMPORTS"], "a") as file:
    file.write(f"{os.getpid()}\\n")
if os.environ.get("FAILS"):
    raise ImportError("as asked")
time.sleep(float(os.environ.get("TAKES", "0")))
"""
SAY = """
import os, sys
print(os.getcwd(), sys.argv[1:], os.environ["RANK"], "slow_import" in sys.modules, os.getppid(), sys.path[0])
print("an error", file=sys.stderr)
sys.exit(int(sys.stdin.readline()))
"""
SLEEP = """
import os, time
print(os.getpid(), flush=True)
time.sleep(600)
"""


class Clients:
    """Started as Ray starts them; folder: has the module `slow_import`, which counts its imports."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_id = folder, uuid.uuid4().hex[:10]
        (folder / "slow_import.py").write_text(IMPORTED)
        self._imports = folder / "imports"
        self._variables = {
            RUN_ID: self.run_id,
            "IMPORTS": str(self._imports),
            "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)]),
        }

    def start(self, code: str, rank: int = 0, **variables: str) -> subprocess.Popen[str]:
        file = self.folder / f"{uuid.uuid4().hex}.py"
        file.write_text(code)
        return self.start_as([str(file)], rank, **variables)

    def start_as(self, what: list[str], rank: int = 0, **variables: str) -> subprocess.Popen[str]:
        """what: that Python is told to run."""
        command = [*shlex.split(fork_command(["slow_import"], {"run": self.run_id})), *what, "an argument"]
        env = os.environ | self._variables | {"RANK": str(rank), REPLICA: f"replica/{rank}"} | variables
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(command, env=env, cwd=self.folder, text=True, **pipes)

    def imports(self) -> list[int]:
        """The processes that have imported the module."""
        return [int(pid) for pid in self._imports.read_text().split()]

    def pid(self, client: subprocess.Popen[str]) -> int:
        """Of a process that sleeps."""
        return int(client.stdout.readline())


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[Clients]:
    clients = Clients(tmp_path)
    yield clients
    assert end(lambda: processes_with(clients.run_id)) == []


def test_a_child_has_what_its_client_was_given(clients: Clients) -> None:
    """Folder, arguments, environment, open files; the exit code comes back; the module was imported once for three."""
    started = [clients.start(SAY, rank) for rank in range(3)]
    for rank, client in enumerate(started):
        said, error = client.communicate(f"{rank + 3}\n", timeout=60)
        folder, rest = said.split(" ", 1)
        [server] = clients.imports()
        assert (folder, rest) == (str(clients.folder), f"['an argument'] {rank} True {server} {clients.folder}\n")
        assert error.endswith("an error\n")
        assert client.returncode == rank + 3


def test_a_child_may_be_a_module(clients: Clients) -> None:
    """As `python -m` would run it: its name, and the folder first of all paths."""
    (clients.folder / "told.py").write_text(SAY)
    started = clients.start_as(["-m", "told"])
    said, _ = started.communicate("0\n", timeout=60)
    assert said.endswith(f"['an argument'] 0 True {clients.imports()[0]} {clients.folder}\n")
    assert started.returncode == 0


def test_others_find_a_child_by_its_own_environment(clients: Clients) -> None:
    """By its replica, too, whose end is not the server's. It has a group of its own, which Ray kills, but no session of
    its own, to which Linux would share out the cores.
    """
    started = [clients.start(SLEEP, rank) for rank in range(2)]
    pids = [clients.pid(client) for client in started]
    for rank, pid in enumerate(pids):
        shown = psutil.Process(pid).environ()
        assert (shown["RANK"], shown[REPLICA], shown[RUN_ID]) == (str(rank), f"replica/{rank}", clients.run_id)
        assert os.getpgid(pid) == pid and os.getsid(pid) == os.getsid(0)
    [server] = clients.imports()
    assert REPLICA not in psutil.Process(server).environ()
    assert {one.pid for one in processes_with(clients.run_id)} == {server, *pids, *(client.pid for client in started)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_and_its_client_end_together(clients: Clients, number: int) -> None:
    """Whichever is killed, and no other; the server stays for those that are left, and goes after them."""
    first, second, third = [clients.start(SLEEP, rank) for rank in range(3)]
    pids = [clients.pid(client) for client in (first, second, third)]
    [server] = clients.imports()
    first.send_signal(number)
    assert eventually(lambda: not lives(pids[0]))
    os.kill(pids[1], number)
    assert second.wait(GONE_S) == -number
    assert third.poll() is None and lives(pids[2])
    os.kill(pids[2], number)
    third.wait(GONE_S)
    assert eventually(lambda: not lives(server), fork_server.IDLE_S + GONE_S)


@pytest.mark.parametrize("variables", [{"FAILS": "1"}, {"TAKES": "600"}], ids=["fails", "is slow"])
def test_a_client_is_the_process_where_imports_fail(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.setattr(fork_server, "READY_LIMIT_S", 8.0)
    client = clients.start(SLEEP, **variables)
    assert clients.pid(client) == client.pid
    assert client.pid not in clients.imports()
    client.kill()
    client.wait(GONE_S)


def test_ranks_of_a_pool_are_forked(tmp_path: Path) -> None:
    """Four ranks through Ray, imported once; a call reaches them; one that dies is named; nothing of them stays."""
    variables = {"TOY_COLOUR": "red", "IMPORTS": str(tmp_path / "imports")}
    (tmp_path / "slow_import.py").write_text(IMPORTED)
    with pytest.MonkeyPatch.context() as patch, ResourcePool(1, 4, "cpu") as ranks:
        patch.syspath_prepend(tmp_path)
        options = PoolOptions(env=variables, preload=("slow_import", "toy_worker"))
        with RayPool("toys", ranks, ToyWorker, options=options) as pool:
            server = int((tmp_path / "imports").read_text())
            processes = [psutil.Process(pid) for pid in pool.pids]
            assert {process.ppid() for process in processes} == {server}
            assert [process.environ()["RANK"] for process in processes] == ["0", "1", "2", "3"]
            assert all(process.name().startswith("ray::") for process in processes)
            toys = pool.host(ToyWorker)
            assert toys.environment("RANK", "TOY_COLOUR").get() == ["0", "red"]
            napping = toys.nap(60)
            processes[2].kill()
            with pytest.raises(WorkerFailure, match=f"rank 2.*process {processes[2].pid}"):
                napping.get()
        assert not any(lives(process.pid) for process in processes)
    assert eventually(lambda: not lives(server))


def test_what_is_imported_for_ranks() -> None:
    """No vLLM where nobody generates, and it is not dragged in; the engine's modules beside the others where somebody
    does; nothing on GPUs. Would not catch what a rank imports besides, which costs time alone.
    """
    without, beside = preloaded("cpu", generates=False), preloaded("cpu", generates=True)
    code = f"import importlib, sys; [importlib.import_module(name) for name in {without}]; print('vllm' in sys.modules)"
    said = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False"]
    assert beside[: len(without)] == without and any(name.startswith("vllm.") for name in beside)
    assert preloaded("cuda", generates=True) == ()
