"""The built-in tool that runs the policy's Python: what it returns, what it cannot do, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from megatron_rl.agents.observation import Observation, ToolCall, Turn
from megatron_rl.agents.python_tool import python
from megatron_rl.agents.tools import ToolEnvironment, load_tools, schemas_of
from megatron_rl.user_code import sandbox

pytestmark = pytest.mark.timeout(120)


def run(*programs: str, timeout_s: float = 30.0) -> Observation:
    environment = ToolEnvironment({"python": python}, len(programs), timeout_s)

    async def episode() -> Observation:
        await environment.reset({})
        return await environment.step(Turn("", tuple(ToolCall("python", {"code": code}) for code in programs)))

    return asyncio.run(episode())


def texts(answer: Observation) -> list[str]:
    return [message["content"] for message in answer.messages]


def test_a_program_says_what_it_prints():
    """Output, errors with their traceback, files of its own, which are gone in the next call; two at once. Would not
    catch a program that waits for input: it has none.
    """
    write = "open('x', 'w').write('1'); import os; print(os.listdir('.'))"
    answer = run("print(6 * 7)", "print('before'); 1 / 0", write, "import os; print(os.listdir('.'))")
    number, error, own, fresh = texts(answer)
    assert (number, own, fresh) == ("42\n", "['x']\n", "[]\n")
    assert error.startswith("before\nTraceback") and "ZeroDivisionError" in error
    assert answer.counts == {"tool_calls": 4.0}


def test_a_program_is_confined(tmp_path: Path):
    """No file outside, no socket, no signal, no variable of the run. Would not catch what it reads: all that its user
    may.
    """
    os.environ["SECRET_OF_THE_RUN"] = "x"
    answer = run(
        f"open({str(tmp_path / 'x')!r}, 'w')",
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        f"import os; os.kill({os.getpid()}, 9)",
        "import os; print(sorted(os.environ))",
    )
    file, socket, killed, variables = texts(answer)
    assert "PermissionError" in file and not (tmp_path / "x").exists()
    assert "PermissionError" in socket and "PermissionError" in killed
    assert "SECRET" not in variables


def test_endless_programs_end(tmp_path: Path):
    """Time, output, memory, a child that goes on: each has a limit, and nothing is left. Would not catch a limit of
    several programs together.
    """
    mark = f"mark{os.getpid()}"
    forks = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99) # {mark}'])"
    late, parent = (texts(run(program, timeout_s=2))[0] for program in ("while True: pass", forks))
    assert late == parent == "Error: python did not return within 2 s"
    loud, large = texts(run("print('x' * 10**7)", "x = ' ' * 10**11"))
    assert loud.endswith("...(truncated)...") and len(loud) < 70_000 and "MemoryError" in large
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if os.access(file, os.R_OK)]
    assert not any(mark.encode() in command for command in commands)


SHARED = """
import mmap, time
held = mmap.mmap(-1, 300 << 20)
held.write(b"x" * (300 << 20))
time.sleep(20)
"""
DELETED = """
import os, time
for n in range(6):
    file = open("f", "wb")
    file.write(b"x" * (50 << 20))
    os.remove("f")
    globals()[f"held{n}"] = file
time.sleep(20)
"""
FORKS = "import os, time\nfor _ in range(600): os.fork() or (time.sleep(20), os._exit(0))\ntime.sleep(20)"


@pytest.mark.parametrize(
    ("program", "rule"),
    [
        (FORKS, "has more than 500 processes at a time"),
        (SHARED, "has more than 0.25 GiB of memory in all processes"),
        ("import time\nfor n in range(10_200): open(str(n), 'w')\ntime.sleep(20)", "writes more than 10000 files"),
        (DELETED, "writes more than 10000 files or 256 MiB"),
    ],
    ids=["processes", "shared memory", "files", "deleted files"],
)
def test_all_processes_of_a_program_have_limits_together(tmp_path, monkeypatch, program, rule):
    """It is ended, what it printed is kept, its folder is gone. Would not catch what is there for less than 0.2 s."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    less = Path(sandbox.__file__).read_text().replace("memory: int = 4 << 30", "memory: int = 1 << 28")
    (tmp_path / "confine.py").write_text(less)
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "confine.py"))
    [text] = texts(run(f"print('begun')\n{program}", timeout_s=60))
    assert text.startswith("begun\n...(ended: it ") and rule in text
    assert [file.name for file in tmp_path.iterdir()] == ["confine.py"]


DEEP = "import os\nfor _ in range(990): os.mkdir('a'); os.chdir('a')\nprint('deep')"
HOLDS = """
import fcntl
file = open({path!r})
for hold in (lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK), lambda: fcntl.flock(file, fcntl.LOCK_EX)):
    try:
        hold()
        print("held")
    except PermissionError:
        print("refused")
"""


def test_what_a_program_may_be_and_hold(tmp_path, monkeypatch):
    """990 folders in one another, 300 KB of text, which no list of processes shows, asyncio; no lease and no lock of a
    file of the user's. Would not catch a read lock of fcntl: docs/train/agents.md has it.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    (tmp_path / "own").write_text("x")
    long = f"print(open('/proc/self/cmdline').read().count('xxx'))\n# {'x' * 300_000}"
    waits = "import asyncio\nasync def main(): await asyncio.sleep(0); print('async')\nasyncio.run(main())"
    answer = run(DEEP, long, waits, HOLDS.format(path=str(tmp_path / "own")))
    assert texts(answer) == ["deep\n", "0\n", "async\n", "refused\nrefused\n"]
    assert list((tmp_path / "scratch").iterdir()) == []


def test_one_line_makes_it_a_tool(tmp_path: Path):
    """As docs/train/agents.md says. Would not catch a template that leaves schemas out."""
    (tmp_path / "tools.py").write_text("from megatron_rl.agents.python_tool import python\n")
    [schema] = schemas_of(load_tools(str(tmp_path / "tools.py"), "key"), "key")
    assert schema["function"]["name"] == "python" and list(schema["function"]["parameters"]["properties"]) == ["code"]
