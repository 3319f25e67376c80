"""The supervisor of a node: how its ranks start, and that whatever ends, and however, nothing of the run stays.

Not caught: a library that does not bear to be imported before a fork. Whole runs, all forked, would show it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from replica_cluster import eventually, is_alive

from megatron_rl.cluster.rank_messages import dumps
from megatron_rl.cluster.scratch import Scratch
from megatron_rl.cluster.stale_processes import end, processes_with
from megatron_rl.cluster.supervisor_client import LocalRankProcess, SupervisorClient
from megatron_rl.roles.preloaded import preloaded

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

LOUD = """
import os, time
with open(os.environ["IMPORTS"], "a") as file:
    file.write(f"{os.getpid()}\\n")
if os.environ.get("FAILS"):
    raise ImportError("as asked")
time.sleep(float(os.environ.get("TAKES", "0")))
"""
CLIENT = """
import sys, time
from megatron_rl.cluster.scratch import Scratch
from megatron_rl.cluster.supervisor_client import SupervisorClient
run_id, name, owns, module = sys.argv[1:]
kept = SupervisorClient(Scratch.join(run_id), [module] * bool(module), {}, name=name, owns_run=bool(owns))
if not module:
    place = {"RANK": "0", "POOL_NAME": "toys"}
    print(kept.start(place, "here", "here").info.result().pid)
print("connected", flush=True)
time.sleep(600)
"""
ORPHAN = "env -i setsid sleep 600 > /dev/null 2>&1 & echo $!"
"""A process without the run's mark, in a session of its own, whose parent ends at once."""


class Node:
    """A run's folder, and the module `loud`, which notes who imports it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scratch = folder, Scratch.begin()
        (folder / "loud.py").write_text(LOUD)
        self.imports = folder / "imports"
        self.variables = {"IMPORTS": str(self.imports), "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}

    def supervise(self, *modules: str, **variables: str) -> SupervisorClient:
        return SupervisorClient(self.scratch, modules, self.variables | variables, owns_run=True)

    def importers(self) -> list[int]:
        return [int(pid) for pid in self.imports.read_text().split()] if self.imports.exists() else []

    def client(self, name: str, owns: str = "", module: str = "", **variables: str) -> tuple[subprocess.Popen, int]:
        """A process that is a client with a rank of its own, and the rank's pid; with a module: 0."""
        command = [sys.executable, "-c", CLIENT, self.scratch.run_id, name, owns, module]
        process = subprocess.Popen(command, env=os.environ | self.variables | variables, stdout=subprocess.PIPE)
        return process, 0 if module else int(process.stdout.readline())

    def close(self, supervision: SupervisorClient) -> bool:
        """End the run; whether nothing of it is left."""
        self.scratch.release()
        supervision.close()
        return not processes_with(self.scratch.run_id) and not self.scratch.folder.exists()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    assert end(lambda: processes_with(node.scratch.run_id)) == []
    node.scratch.remove()


def start(supervision: SupervisorClient, rank: int, **variables: str) -> LocalRankProcess:
    place = {"RANK": str(rank), "POOL_NAME": "toys", **variables}
    return supervision.start(place, "here", "here")


def ask(rank: LocalRankProcess, code: str, *arguments: object) -> object:
    """The value of an expression on a rank, which has no host: `listen_for_ranks` unpickles it."""
    return rank.send(dumps(("listen_for_ranks", (Evaluated(code, arguments),)))).result(60)


class Evaluated(str):
    """Unpickled, it is the host to listen on; before that, it has run code whose value a file keeps."""

    def __new__(cls, code: str, arguments: tuple) -> Evaluated:
        self = super().__new__(cls, "127.0.0.1")
        self.code, self.arguments = code, arguments
        return self

    def __reduce__(self) -> tuple:
        return run_there, (self.code, self.arguments)


def run_there(code: str, arguments: tuple) -> str:
    exec(code, {"arguments": arguments})
    return "127.0.0.1"


def value(rank: LocalRankProcess, folder: Path, code: str) -> str:
    file = folder / "value"
    ask(rank, f"import os, sys\nopen(arguments[0], 'w').write(str({code}))", str(file))
    return file.read_text()


def test_ranks_are_forked_with_what_was_imported_once(node: Node) -> None:
    """Each has its own variables, process group, title and log; all are in the supervisor's session."""
    supervision = node.supervise("loud", "megatron_rl.cluster.rank_worker")
    ranks = [start(supervision, rank, COLOUR=f"red {rank}") for rank in range(3)]
    [supervisor] = {psutil.Process(rank.info.result(60).pid).ppid() for rank in ranks}
    assert node.importers() == [supervisor] == [supervision.pid]
    for number, rank in enumerate(ranks):
        pid = rank.info.result().pid
        seen = value(rank, node.folder, "(os.environ['COLOUR'], os.environ['TMPDIR'], 'loud' in sys.modules)")
        assert seen == str((f"red {number}", str(node.scratch.folder), True))
        assert os.getpgid(pid) == pid and os.getsid(pid) == os.getsid(supervisor) == supervisor
        process = psutil.Process(pid)
        assert process.name() == f"rank {number}" and process.cmdline()[0] == f"rank {number} of toys"
        ask(rank, "print(arguments[0], flush=True)", f"said by {number}")
        [log] = node.scratch.folder.glob(f"rank_{number}_*.log")
        assert log.read_text() == f"said by {number}\n"
    ranks[1].kill()
    assert ranks[1].ended.result(60) == "it was killed by SIGKILL"
    ranks[2].send(dumps(("listen_for_ranks", (Evaluated("import os; os._exit(7)", ()),))))
    assert ranks[2].ended.result(60) == "it exited with code 7"
    assert value(ranks[0], node.folder, "1 + 1") == "2"
    assert node.close(supervision)


@pytest.mark.exhaustive
def test_a_rank_is_a_python_of_its_own_where_nothing_is_imported(node: Node) -> None:
    """Ranks on GPUs are started so. The title takes the place of its command line."""
    supervision = node.supervise()
    rank = start(supervision, 0, COLOUR="blue")
    assert value(rank, node.folder, "(os.environ['COLOUR'], 'loud' in sys.modules)") == str(("blue", False))
    process = psutil.Process(rank.info.result().pid)
    assert process.ppid() == supervision.pid and process.cmdline()[0] == "rank 0 of toys"
    assert node.close(supervision)


@pytest.mark.exhaustive
def test_an_import_that_fails_is_left_to_the_ranks(node: Node) -> None:
    supervision = node.supervise("loud", "no_such_module", FAILS="1")
    rank = start(supervision, 0)
    assert value(rank, node.folder, "'loud' in sys.modules") == "False" and node.importers() == [supervision.pid]
    assert node.close(supervision)


def test_an_orphan_without_a_mark_does_not_outlive_the_run(node: Node) -> None:
    """It left its rank's group, session and environment. Would not catch one on another machine."""
    supervision = node.supervise()
    rank = start(supervision, 0)
    code = f"__import__('subprocess').run({ORPHAN!r}, shell=True, capture_output=True, text=True).stdout"
    orphan = int(value(rank, node.folder, code))
    assert eventually(lambda: psutil.Process(orphan).ppid() == supervision.pid)
    assert node.close(supervision) and not is_alive(orphan)


def test_ranks_end_with_their_client_and_others_go_on(node: Node) -> None:
    """Two agents of one node; the second holds the supervisor until it ends, too."""
    first, first_rank = node.client("supervisor_a")
    second, second_rank = node.client("supervisor_a")
    first.kill()
    first.wait()
    assert eventually(lambda: not is_alive(first_rank))
    assert is_alive(second_rank)
    second.kill()
    second.wait()
    assert eventually(lambda: not processes_with(node.scratch.run_id))


@pytest.mark.exhaustive
def test_the_end_of_one_node_is_not_that_of_another(node: Node) -> None:
    """Two nodes of one machine, as tests have them; then the driver's end, which is that of everything."""
    supervision = node.supervise()
    rank = start(supervision, 0)
    agent, of_agent = node.client("supervisor_b")
    agent.kill()
    agent.wait()
    assert eventually(lambda: not is_alive(of_agent))
    assert is_alive(rank.info.result(60).pid)
    agent, of_agent = node.client("supervisor_c")
    assert not eventually(lambda: not is_alive(of_agent), 0.5)
    supervision.close()
    assert eventually(lambda: not is_alive(of_agent))
    agent.kill()
    agent.wait()


@pytest.mark.parametrize("how", ["supervisor", "driver", "driver while modules are imported"])
def test_a_kill_leaves_nothing(node: Node, how: str) -> None:
    """SIGKILL. Ranks end with their supervisor by the kernel, with the driver by the supervisor."""
    importing = how.endswith("imported")
    driver, rank = node.client("supervisor", "owns", module="loud" if importing else "", TAKES="600")
    node.scratch.release()
    killed: Callable[[], None] = driver.kill
    if importing:
        assert eventually(lambda: node.importers() != [])
    elif how == "supervisor":
        killed = psutil.Process(rank).parent().kill
    killed()
    assert eventually(lambda: rank == 0 or not is_alive(rank))
    if how == "supervisor":
        assert driver.poll() is None
        driver.kill()
    driver.wait()
    assert eventually(lambda: not processes_with(node.scratch.run_id))
    assert how == "supervisor" or eventually(lambda: not node.scratch.folder.exists())


@pytest.mark.exhaustive
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
