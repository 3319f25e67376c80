"""The supervisor or a rank dies at a random instant of a start without Ray."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from drivers import running
from replica_cluster import eventually, run_id_of

from megatron_rl.cluster.stale_processes import living, processes_with
from megatron_rl.errors import WorkerFailure

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(600)]

LATEST_S = 1.5
"""Seconds from the victim's own start: in half of them, on a machine with nothing else to do, its rank is in a call."""

PATIENCE_S = 120.0


def supervisor_of(driver: psutil.Process) -> psutil.Process | None:
    """Return the driver's supervisor; None while there is none."""
    for child in driver.children():
        with suppress(psutil.Error):
            if "megatron_rl.cluster.supervisor" in child.cmdline():
                return child
    return None


def rank_of(driver: psutil.Process) -> psutil.Process | None:
    """Return the driver's rank, the only child of its supervisor; None while there is none."""
    return next(iter(driver.children(recursive=True)[1:]), None)


@pytest.mark.parametrize(
    ("victim", "modules", "seed"),
    [
        pytest.param(victim, modules, seed, id=f"{name} {seed}")
        for seed in range(3)
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
    """SIGKILL: code 3, one line on stderr, neither process nor folder is left. Would not catch an instant that 3 draws
    miss.
    """
    after_s = random.Random(seed).uniform(0.0, LATEST_S)
    with running("doomed_driver.py", "local", "600", *modules) as driver:
        process, victims = psutil.Process(driver.pid), list[psutil.Process | None]()
        assert eventually(lambda: victims.append(victim(process)) or victims[-1] is not None, PATIENCE_S)
        time.sleep(after_s)
        tree, run_id = process.children(recursive=True), run_id_of(process.children()[0].pid)
        victims[-1].kill()
        errors = driver.communicate(timeout=PATIENCE_S)[1]
    case = f"{after_s:.2f} s after its start: {errors}"
    assert driver.returncode == WorkerFailure.exit_code, case
    assert len(errors.splitlines()) == 1, case
    assert not list(Path(tempfile.gettempdir()).glob(f"megatron_rl-{os.getuid()}/{run_id}")), case
    assert eventually(lambda: not living([*tree, *processes_with(run_id)])), case
