"""Processes are found by their mark, or by descent, and ended together with whatever they start meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import psutil
import pytest

from megatron_rl.cluster.leftovers import descendants, end, living, marked, process_time

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
def mark() -> Iterator[str]:
    mark = uuid.uuid4().hex
    yield mark
    assert end(lambda: marked(mark, VARIABLE)) == []


def start(script: str, mark: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", script], env=os.environ | {VARIABLE: mark})


def wait_for(mark: str, count: int) -> list[psutil.Process]:
    deadline = time.monotonic() + PATIENCE_S
    while len(found := marked(mark, VARIABLE)) != count:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def test_a_mark_finds_who_has_lost_its_parents(mark):
    """A child and a grandchild in a session of their own, whose parent has ended; another mark finds none.

    Would not catch a process that was started with an emptied environment.
    """
    start(HEIRS, mark).wait(PATIENCE_S)
    found = wait_for(mark, 2)
    assert not set(found) & descendants()
    assert marked(uuid.uuid4().hex, VARIABLE) == [] and marked(mark, f"{VARIABLE}_OTHER") == []
    assert end(lambda: marked(mark, VARIABLE)) == []
    assert living(found) == []


def test_a_number_that_another_process_had_before(mark):
    """psutil remembers a process of that number, which has ended. Would not catch one that ends meanwhile."""
    one = start("import time; time.sleep(600)", mark)
    list(psutil.process_iter())
    gone = next(process for process in psutil.process_iter() if process.pid == one.pid)
    gone._ident = (one.pid, gone.create_time() - 1000)
    assert [process.pid for process in marked(mark, VARIABLE)] == [one.pid]
    assert end(lambda: marked(mark, VARIABLE)) == []
    assert one.wait(PATIENCE_S) == -9


def test_who_starts_another_one_meanwhile_is_ended_with_it(mark):
    """Thirty generations, 20 ms apart, each started by the one before. Would not catch one faster than a look."""
    process = start(RELAY.format(generations=30), mark)
    time.sleep(0.2)
    assert end(lambda: marked(mark, VARIABLE)) == []
    assert process.wait(PATIENCE_S) == -9 and marked(mark, VARIABLE) == []


def test_one_that_has_not_been_waited_for_is_found_by_descent_alone(mark):
    """Dead, but its parent has not noticed: nothing is left to end. Would not catch one that hangs in the kernel."""
    process = start("", mark)
    child = psutil.Process(process.pid)
    deadline = time.monotonic() + PATIENCE_S
    while child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert living([child]) == [] and child in descendants() and marked(mark, VARIABLE) == []
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


def test_processes_are_as_old_as_the_clock_says(mark):
    """To a tick of the system's, on whichever part of a second it was booted. Would not catch a clock that is set."""
    before = process_time()
    process = start("import time; time.sleep(600)", mark)
    after = process_time()
    assert before - TICK_S <= psutil.Process(process.pid).create_time() <= after + TICK_S
    assert end(lambda: marked(mark, VARIABLE)) == []
    process.wait()
