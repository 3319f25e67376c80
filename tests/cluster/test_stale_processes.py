"""Processes are found by their environment, or by descent, and ended together with whatever they start meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import psutil
import pytest

from megatron_rl.cluster.stale_processes import (
    children_with,
    descendants,
    end,
    leaving_none_running,
    living,
    process_time,
    processes_with,
)

pytestmark = pytest.mark.timeout(60)

VARIABLE = "MEGATRON_RL_TEST_LEFTOVERS"
TICK_S = 1.5 / os.sysconf("SC_CLK_TCK")
"""Of the system's clock, with room for rounding."""
PATIENCE_S = 50
HEIRS = """
import os, subprocess, sys, time
os.setsid()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if os.fork():
    os._exit(0)
time.sleep(600)
"""
RELAY = """
import os, signal, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range({generations}):
    if os.fork():
        time.sleep(600)
    time.sleep(0.02)
time.sleep(600)
"""


@pytest.fixture
def tag() -> Iterator[str]:
    tag = uuid.uuid4().hex
    yield tag
    assert end(lambda: processes_with(tag, VARIABLE)) == []


def start(script: str, tag: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", script], env=os.environ | {VARIABLE: tag})


def wait_for(tag: str, count: int) -> list[psutil.Process]:
    deadline = time.monotonic() + PATIENCE_S
    while len(found := processes_with(tag, VARIABLE)) != count:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def test_a_variable_finds_who_has_lost_its_parents(tag):
    """A child and a grandchild in a session of their own, whose parent has ended; another value finds none.

    Would not catch a process that was started with an emptied environment.
    """
    start(HEIRS, tag).wait(PATIENCE_S)
    found = wait_for(tag, 2)
    assert not set(found) & descendants()
    assert processes_with(uuid.uuid4().hex, VARIABLE) == [] and processes_with(tag, f"{VARIABLE}_OTHER") == []
    assert end(lambda: processes_with(tag, VARIABLE)) == []
    assert living(found) == []


def test_a_number_that_another_process_had_before(tag):
    """psutil remembers a process of that number, which has ended. Would not catch one that ends meanwhile."""
    one = start("import time; time.sleep(600)", tag)
    list(psutil.process_iter())
    gone = next(process for process in psutil.process_iter() if process.pid == one.pid)
    gone._ident = (one.pid, gone.create_time() - 1000)
    assert [process.pid for process in processes_with(tag, VARIABLE)] == [one.pid]
    assert end(lambda: processes_with(tag, VARIABLE)) == []
    assert one.wait(PATIENCE_S) == -9


def test_who_starts_another_one_meanwhile_is_ended_with_it(tag):
    """Thirty generations, 20 ms apart, each started by the one before. Would not catch one faster than a look."""
    process = start(RELAY.format(generations=30), tag)
    time.sleep(0.2)
    assert end(lambda: processes_with(tag, VARIABLE)) == []
    assert process.wait(PATIENCE_S) == -9 and processes_with(tag, VARIABLE) == []


def test_one_that_has_not_been_waited_for_is_found_by_descent_alone(tag):
    """Dead, but its parent has not noticed: nothing is left to end. Would not catch one that hangs in the kernel."""
    process = start("", tag)
    child = psutil.Process(process.pid)
    deadline = time.monotonic() + PATIENCE_S
    while child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert living([child]) == [] and child in descendants() and processes_with(tag, VARIABLE) == []
    assert process.wait() == 0 and child not in descendants()


def test_what_cannot_be_ended_is_returned_in_time():
    """One that is dead, and is found all the same. Without patience it is tried once; else every 50 ms."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    gone = psutil.Process(process.pid)
    process.wait()
    for patience, most in ((0.0, 1), (0.3, 8)):
        started, looks = time.monotonic(), []
        assert end(lambda looks=looks: looks.append(1) or [gone], patience) == [gone]
        assert patience <= time.monotonic() - started and len(looks) <= most


def test_processes_are_as_old_as_the_clock_says(tag):
    """To a tick of the system's, on whichever part of a second it was booted. Would not catch a clock that is set."""
    before = process_time()
    process = start("import time; time.sleep(600)", tag)
    after = process_time()
    assert before - TICK_S <= psutil.Process(process.pid).create_time() <= after + TICK_S
    assert end(lambda: processes_with(tag, VARIABLE)) == []
    process.wait()


def test_a_block_leaves_nothing_running(tag: str) -> None:
    """A child, one in a session of its own and one that has lost its parent, where a signal ends the block. Would not
    catch a process that the block has not started itself.
    """
    script = ["sh", "-c", "sleep 600 & setsid sleep 600 & (setsid sh -c 'sleep 600; true' &)"]
    with pytest.raises(SystemExit), leaving_none_running():
        subprocess.run(script, env=os.environ | {VARIABLE: tag}, check=True)
        found = wait_for(tag, 4)
        assert {*children_with(os.getpid(), tag, VARIABLE)} == {*found}
        assert children_with(os.getpid(), "another", VARIABLE) == []
        raise SystemExit(143)
    assert processes_with(tag, VARIABLE) == []
