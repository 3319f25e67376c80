"""The driver is killed: nothing it started may outlive it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_rl.controller.reaper import MARK, Reaper
from megatron_rl.errors import GraceOver

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


@pytest.fixture
def doomed(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen, list[psutil.Process]]]:
    """A driver with a worker in a call, and its whole process tree; the fixture's parameter is its argument list."""
    script = Path(__file__).with_name("doomed_driver.py")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command, pipe = [sys.executable, script, *request.param], subprocess.PIPE
    driver = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True)
    tree: list[psutil.Process] = []
    try:
        told = json.loads(driver.stdout.readline())
        tree = [psutil.Process(pid) for pid in told["tree"]]
        assert set(told["workers"] + told["children"]) <= set(told["tree"])
        yield driver, tree
    finally:
        driver.kill()
        driver.wait()
        for process in tree:
            if process.is_running():
                process.kill()


@pytest.mark.parametrize(
    ("doomed", "send", "signals", "exit_code"),
    [
        ([], os.kill, [signal.SIGKILL], -signal.SIGKILL),
        ([], os.killpg, [signal.SIGTERM], 143),
        (["1"], os.killpg, [signal.SIGTERM], GraceOver.exit_code),
        (["600"], os.kill, [signal.SIGTERM, signal.SIGINT], 130),
        (["600"], os.kill, [signal.SIGINT, signal.SIGTERM], 143),
    ],
    indirect=["doomed"],
    ids=["SIGKILL", "SIGTERM", "grace over", "second signal SIGINT", "second signal SIGTERM"],
)
def test_nothing_outlives_a_killed_driver(doomed: tuple, send: Callable, signals: list[int], exit_code: int) -> None:
    """While it waits in a Ray call; `os.killpg`: its process group is signalled, as schedulers do it.

    Would not catch what is left on another node of a cluster.
    """
    driver, tree = doomed
    for signum in signals:
        send(driver.pid, signum)
        if signum != signals[-1]:  # Ray looks for signals once a second, and Python takes lower numbers first
            assert any("a second signal ends it" in line for line in driver.stderr)
    assert driver.wait(timeout=30) == exit_code
    deadline = time.monotonic() + 30
    while (left := [process for process in tree if process.is_running()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_a_child_whose_parents_died_first_is_found_by_its_mark() -> None:
    """The order of deaths that a busy machine makes: nobody is left to know the grandchild's pid.

    Would not catch a process that was started with an emptied environment.
    """
    reaper = Reaper()
    with reaper.marking():
        script = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL).pid)"
        orphan = psutil.Process(int(subprocess.check_output([sys.executable, "-c", script])))
    assert MARK not in os.environ
    assert orphan.is_running()
    reaper.stop()
    psutil.wait_procs([orphan], timeout=10)
    assert not orphan.is_running()
