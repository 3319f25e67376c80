"""One of Ray's daemons dies at a random instant, from its own start on."""

from __future__ import annotations

import random
import subprocess
import time

import psutil
import pytest
from drivers import running

from megatron_rl.cluster.stale_processes import RUN_ID, living, processes_with, variable_of
from megatron_rl.errors import WorkerFailure

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(600)]

WAITING, PUTTING = ("doomed_driver.py", "ray", "600"), ("putting_driver.py",)
"""Scripts with their arguments: one driver waits in a call, the other one puts objects."""
DAEMONS = ("gcs_server", "raylet")
LATEST_S = 6.0
"""Seconds from a daemon's start: Ray starts in two, the pool in another one, and then the driver waits in a call."""

PATIENCE_S = 120.0


def kill_daemon(
    driver: subprocess.Popen[str], name: str, after_s: float
) -> tuple[int, str | None, list[psutil.Process]]:
    """SIGKILL a daemon of the driver some seconds after its start; its pid, its run, all processes below the driver."""
    deadline, process = time.monotonic() + PATIENCE_S, psutil.Process(driver.pid)
    while not (daemons := [child for child in process.children() if child.name() == name]):
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(after_s)
    tree, run_id = process.children(recursive=True), variable_of(daemons[0], RUN_ID)
    daemons[0].kill()
    return daemons[0].pid, run_id, tree


@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(first, first + 8), marks=() if first < 8 else pytest.mark.weekly) for first in range(0, 40, 8)],
    ids=lambda seeds: str(seeds)[5:],
)
def test_a_daemon_may_die_at_any_instant(seeds: range) -> None:
    """While Ray starts, the pool starts, and in a call: code 3, the sentence that names the daemon, and no process is
    left. Would not catch an instant that 40 draws miss.
    """
    for seed in seeds:
        draw = random.Random(seed)
        check_death(WAITING, draw.choice(DAEMONS), draw.uniform(0.0, LATEST_S))


def test_a_driver_that_is_in_a_call_to_its_raylet_says_what_died() -> None:
    """The GCS server dies while the driver puts objects, 8 times: the raylet, without which Ray ends the driver with
    code 1 and no message, ends after the driver. Would not catch a raylet that dies itself.
    """
    draw = random.Random(0)
    for _ in range(8):
        check_death(PUTTING, "gcs_server", draw.uniform(LATEST_S / 2, LATEST_S))


def check_death(script: tuple[str, ...], victim: str, after_s: float) -> None:
    """Kill a daemon of one driver, and check how the driver ends and what is left."""
    with running(*script) as driver:
        pid, run_id, tree = kill_daemon(driver, victim, after_s)
        errors = driver.communicate(timeout=PATIENCE_S)[1]
    case = f"{victim} {after_s:.2f} s after its start: {errors}"
    assert driver.returncode == WorkerFailure.exit_code, case
    named = [line for line in errors.splitlines() if line.startswith(f"Ray's {victim} (process {pid}) ")]
    assert len(named) == 1 and "Traceback" not in errors, case
    assert run_id is not None, case
    deadline = time.monotonic() + PATIENCE_S
    while (left := living([*tree, *processes_with(run_id)])) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == [], case
