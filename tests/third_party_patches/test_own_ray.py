"""What a Ray that a run has started itself consists of. One that is joined was started by others."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest
from launchers import SHARED_RAY
from listeners import listening, open_to_others

from megatron_rl.cluster.ray_session import RaySession, variables

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def earlier() -> set[tuple[str, str, int]]:
    """What this process listened on before."""
    return listening([psutil.Process()])


@pytest.fixture(scope="module")
def daemons(earlier: set[tuple[str, str, int]]) -> Iterator[list[psutil.Process]]:
    """The processes that `ray.init` has started; when it has ended, Ray's variables are as they were."""
    SHARED_RAY.end()
    before, kept = set(psutil.Process().children()), variables()
    with RaySession(1):
        yield [child for child in psutil.Process().children() if child not in before]
    assert variables() == kept


def commands(processes: list[psutil.Process]) -> str:
    return "\n".join(" ".join(process.cmdline()) for process in processes)


def test_nothing_is_started_that_a_run_does_not_use(daemons: list[psutil.Process]) -> None:
    """No dashboard server, no log monitor, no autoscaler; what answers calls is there. Would not catch a daemon with a
    new name.
    """
    import ray

    found = commands(daemons)
    assert "gcs_server" in found and "raylet" in found
    assert not any(name in found for name in ("dashboard/dashboard.py", "log_monitor.py", "monitor.py"))
    assert ray.get(ray.remote(lambda: os.getpid()).remote()) != os.getpid()


def test_nobody_else_can_reach_it(daemons: list[psutil.Process], earlier: set[tuple[str, str, int]]) -> None:
    """Every socket that listens, of Ray's processes, a worker and this one, is on the loopback interface. Would not
    catch one of a later moment; a whole run's are looked at in test_resumed_runs.py.
    """
    import ray

    worker = psutil.Process(ray.get(ray.remote(lambda: os.getpid()).remote()))
    found = listening([psutil.Process(), *daemons]) - earlier
    names = {"gcs_server", "raylet", "ray::RuntimeEnvAg", worker.name(), psutil.Process().name()}
    assert names <= {name[:17] for name, *_ in found}
    assert open_to_others(found) == set()


def test_daemons_lead_their_sessions(daemons: list[psutil.Process]) -> None:
    """A signal to the driver's group does not reach them."""
    led = {process.pid: os.getsid(process.pid) for process in daemons if process.name() in ("gcs_server", "raylet")}
    assert len(led) == 2 and all(pid == session for pid, session in led.items())
