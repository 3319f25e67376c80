"""The supervisor or a rank dies at a random instant of a start without Ray."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from replica_cluster import eventually, run_id_of

from megatron_rl.cluster.leftovers import living, processes_with
from megatron_rl.errors import WorkerFailure

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(600)]

DRIVER = Path(__file__).with_name("doomed_driver.py")
LATEST_S = 1.5
"""Seconds from the victim's own start: in half of them, on a machine with nothing else to do, its rank is in a call."""

PATIENCE_S = 120.0


def supervisor_of(driver: psutil.Process) -> psutil.Process | None:
    """Once there is one."""
    for child in driver.children():
        with suppress(psutil.Error):
            if "megatron_rl.cluster.supervisor" in child.cmdline():
                return child
    return None


def rank_of(driver: psutil.Process) -> psutil.Process | None:
    """Once there is one: its supervisor's only child."""
    return next(iter(driver.children(recursive=True)[1:]), None)


@pytest.mark.parametrize(
    ("victim", "modules", "seed"),
    [
        pytest.param(victim, modules, seed, id=f"{name} {seed}")
        for seed in range(5)
        for name, victim, modules in (
            ("supervisor", supervisor_of, []),
            ("supervisor that imports", supervisor_of, ["fragile_worker", "torch"]),
            ("rank", rank_of, []),
            ("forked rank", rank_of, ["fragile_worker"]),
        )
    ],
)
def test_the_supervisor_or_a_rank_may_die_at_any_instant(
    victim: Callable[[psutil.Process], psutil.Process | None], modules: list[str], seed: int
) -> None:
    """SIGKILL: code 3, one line on stderr, neither process nor folder is left. Would not catch an instant that 5 draws
    miss.
    """
    path = os.pathsep.join([str(DRIVER.parent), *filter(None, sys.path)])
    driver = subprocess.Popen(
        [sys.executable, DRIVER, "local", "600", *modules],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "HOME": "/proc/none"},
        start_new_session=True,
    )
    process, after_s = psutil.Process(driver.pid), random.Random(seed).uniform(0.0, LATEST_S)
    try:
        found: list[psutil.Process | None] = []
        assert eventually(lambda: found.append(victim(process)) or found[-1] is not None, PATIENCE_S)
        time.sleep(after_s)
        tree, run_id = process.children(recursive=True), run_id_of(process.children()[0].pid)
        found[-1].kill()
        said = driver.communicate(timeout=PATIENCE_S)[1]
    finally:
        driver.kill()
        driver.wait()
    case = f"{after_s:.2f} s after its start: {said}"
    assert driver.returncode == WorkerFailure.exit_code, case
    assert len(said.splitlines()) == 1, case
    assert not list(Path(tempfile.gettempdir()).glob(f"megatron_rl-{os.getuid()}/{run_id}")), case
    assert eventually(lambda: not living([*tree, *processes_with(run_id)])), case
