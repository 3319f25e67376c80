"""The driver is killed: nothing it started may outlive it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from drivers import running
from launchers import BOTH
from replica_cluster import eventually

from megatron_rl.cluster.scratch import SEGMENTS
from megatron_rl.cluster.stale_processes import RUN_ID, end, living
from megatron_rl.errors import GracePeriodExpired, WorkerFailure

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

PATIENCE_S = 60


@pytest.fixture
def doomed(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen, list[psutil.Process]]]:
    """As `driven`; the fixture's parameter is the driver's argument list."""
    with driven(*request.param) as tree:
        yield tree


@pytest.fixture
def own_temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder for temporary files that no other run on this machine cleans; of a short name, as sockets go there."""
    folder = Path("/tmp", uuid.uuid4().hex[:4])
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    shutil.rmtree(folder)


@contextmanager
def driven(*arguments: str) -> Iterator[tuple[subprocess.Popen, list[psutil.Process]]]:
    """A driver with a worker in a call, and its whole process tree; its home folder is none and cannot be made."""
    tree: list[psutil.Process] = []
    try:
        with running("doomed_driver.py", *arguments, stdout=subprocess.PIPE) as driver:
            told = json.loads(driver.stdout.readline())
            tree = [psutil.Process(pid) for pid in told["tree"]]
            assert set(told["workers"] + told["children"]) <= set(told["tree"])
            yield driver, tree
    finally:
        assert end(lambda: living(tree)) == []


ENDS = {
    "SIGINT": ([], os.kill, [signal.SIGINT], 130),
    "SIGTERM": ([], os.killpg, [signal.SIGTERM], 143),
    "grace over": (["1"], os.killpg, [signal.SIGTERM], GracePeriodExpired.exit_code),
    "second signal SIGINT": (["600"], os.kill, [signal.SIGTERM, signal.SIGINT], 130),
    "second signal SIGTERM": (["600"], os.kill, [signal.SIGINT, signal.SIGTERM], 143),
    "SIGKILL": ([], os.kill, [signal.SIGKILL], -signal.SIGKILL),
}
OFTEN = {("local", "SIGKILL")}
"""The launcher and the end of each case that is no sweep."""
SWEPT = {
    *(("local", end) for end in ("SIGINT", "grace over", "second signal SIGTERM")),
    *(("ray", end) for end in ("SIGTERM", "second signal SIGINT", "SIGKILL")),
}
"""Each end through one launcher, and a kill through both; `test_signals.py` has every pair of signals."""


@pytest.mark.parametrize(
    ("doomed", "send", "signals", "exit_code"),
    [
        pytest.param(
            [kind, *grace],
            *how,
            id=f"{kind} {name}",
            marks=[] if (kind, name) in OFTEN else pytest.mark.exhaustive,
        )
        for kind in ("local", "ray")
        for name, (grace, *how) in ENDS.items()
        if (kind, name) in OFTEN | SWEPT
    ],
    indirect=["doomed"],
)
def test_nothing_outlives_a_killed_driver(doomed: tuple, send: Callable, signals: list[int], exit_code: int) -> None:
    """While it waits for an answer; `os.killpg`: its process group is signalled, as schedulers do it.

    Would not catch what is left on another node of a cluster.
    """
    assert_nothing_is_left(*doomed, send, signals, exit_code)


def assert_nothing_is_left(
    driver: subprocess.Popen, tree: list[psutil.Process], send: Callable, signals: list[int], exit_code: int
) -> None:
    """Of the driver's processes and its folder, once it has ended with `exit_code` by these signals."""
    folder = scratch_of(tree)
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    for signum in signals:
        send(driver.pid, signum)
        if signum != signals[-1]:  # Ray looks for signals once a second, and Python takes lower numbers first
            assert any("a second signal ends it" in line for line in driver.stderr)
    assert driver.wait(timeout=PATIENCE_S) == exit_code
    deadline = time.monotonic() + PATIENCE_S
    while (left := [process for process in tree if process.is_running()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not folder.exists()


def scratch_of(tree: list[psutil.Process]) -> Path:
    """The folder of the run that these processes belong to."""
    marks = set()
    for process in tree:
        with suppress(psutil.Error):  # one of Ray's that has just ended
            marks.add(process.environ().get(RUN_ID))
    [run_id] = marks - {None}
    [folder] = Path(tempfile.gettempdir()).glob(f"megatron_rl-{os.getuid()}/{run_id}")
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("doomed", [["ray", "600"]], indirect=True, ids=[""])
@pytest.mark.parametrize("victim", ["gcs_server", "raylet"])
def test_without_ray_the_run_ends_with_one_message(doomed: tuple, victim: str) -> None:
    """At once, with code 3, and nothing is left. Would not catch a driver that is just putting an object into Ray's
    memory when the raylet dies: Ray ends that process itself.
    """
    driver, tree = doomed
    folder = scratch_of(tree)
    [killed] = [process for process in tree if process.name() == victim]
    killed.kill()
    assert driver.wait(timeout=PATIENCE_S) == WorkerFailure.exit_code
    text = driver.stderr.read()
    assert text.startswith(f"Ray's {victim} (process {killed.pid}) was killed by SIGKILL, and the run cannot continue")
    assert len(text.splitlines()) == 1
    psutil.wait_procs(tree, timeout=PATIENCE_S)
    assert [process for process in tree if process.is_running()] == []
    assert not folder.exists()


@pytest.mark.parametrize("kind", BOTH)
def test_without_its_supervisor_the_run_ends_with_one_message(kind: str) -> None:
    """Its ranks end with it, which the run notices. Would not catch what an orphan of a rank starts meanwhile."""
    with driven(kind, "600") as (driver, tree):
        folder = scratch_of(tree)
        [supervisor] = [one for one in tree if one.is_running() and "megatron_rl.cluster.supervisor" in one.cmdline()]
        supervisor.kill()
        assert driver.wait(timeout=PATIENCE_S) == WorkerFailure.exit_code
        text = driver.stderr.read()
        assert text.startswith("rank 0 (host): the process died ") and "SIGKILL" in text, text
        assert eventually(lambda: not any(one.is_running() for one in tree)) and not folder.exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["local", "ray"])
def test_the_next_start_removes_what_nobody_could(kind: str, own_temporary: None) -> None:
    """Driver, ranks, Ray and the supervisor are killed at once, as with a whole control group; of the next one the
    driver alone, which leaves nothing.

    Would not catch what the run had on another node.
    """
    with driven(kind) as (driver, tree):
        folder = scratch_of(tree)
        for process in [driver, *tree]:
            process.send_signal(signal.SIGSTOP)
        for process in [driver, *tree]:
            process.kill()
        driver.wait()
        psutil.wait_procs(tree, timeout=PATIENCE_S)
    segment = SEGMENTS / f"megatron_rl-{folder.name}-queue"
    segment.touch()  # as vLLM's would be
    assert folder.exists()
    with driven(kind) as (driver, tree):
        assert not folder.exists() and not segment.exists()
        assert_nothing_is_left(driver, tree, os.kill, [signal.SIGKILL], -signal.SIGKILL)
