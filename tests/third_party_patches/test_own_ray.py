"""What a Ray that a run has started itself consists of. One that is joined was started by others."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest

from megatron_rl.cluster.ray_session import RaySession
from third_party_patches.ray.workers import setup_worker

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def daemons() -> Iterator[list[psutil.Process]]:
    """The processes that `ray.init` has started."""
    before = set(psutil.Process().children())
    with RaySession(1):
        yield [child for child in psutil.Process().children() if child not in before]


def commands(processes: list[psutil.Process]) -> str:
    return "\n".join(" ".join(process.cmdline()) for process in processes)


def test_nothing_is_started_that_a_run_does_not_use(daemons: list[psutil.Process]) -> None:
    """No dashboard server and no log monitor; what answers calls is there. Would not catch a daemon with a new name."""
    import ray

    found = commands(daemons)
    assert "gcs_server" in found and "raylet" in found
    assert "dashboard/dashboard.py" not in found and "log_monitor.py" not in found
    assert ray.get(ray.remote(lambda: os.getpid()).remote()) != os.getpid()


def test_raylets_set_workers_up_quickly(daemons: list[psutil.Process]) -> None:
    """With our file, in the place of Ray's."""
    [raylet] = [process for process in daemons if process.name() == "raylet"]
    assert f" {setup_worker.__file__} " in commands([raylet])


def test_daemons_lead_their_sessions(daemons: list[psutil.Process]) -> None:
    """A signal to the driver's group does not reach them."""
    led = {process.pid: os.getsid(process.pid) for process in daemons if process.name() in ("gcs_server", "raylet")}
    assert len(led) == 2 and all(pid == session for pid, session in led.items())
