"""The folder of a run: whose it is, how long it stays, and what a start removes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.cluster import scratch
from megatron_rl.cluster.scratch import SEGMENTS, Scratch, of_dead_runs
from megatron_rl.cluster.stale_processes import RUN_ID
from megatron_rl.errors import ConfigError

HOLDER = """
import sys
from megatron_rl.cluster.scratch import Scratch
held = Scratch.begin()
print(held.folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of the test's own, for this process and those that it starts."""
    monkeypatch.setattr(scratch, "LONGEST_BASE", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def holder(place: Path) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A process with a run's folder, which holds a socket's file and has a segment."""
    program = f"from megatron_rl.cluster import scratch; scratch.LONGEST_BASE = 1000{HOLDER}"
    env = os.environ | {"TMPDIR": str(place), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    folder = Path(process.stdout.readline().strip())
    segment = SEGMENTS / f"megatron_rl-{folder.name}-queue"
    (folder / "socket").touch()
    segment.touch()
    yield process, folder
    process.kill()
    process.wait()
    segment.unlink(missing_ok=True)


def test_what_is_removed_of_shared_memory() -> None:
    """Would not catch a run_id that two machines share."""
    names = ["megatron_rl-aaaa-queue", "megatron_rl-aaaa-29500-tp:0_1", "megatron_rl-bbbb-queue", "psm_0123", "aaaa-1"]
    ours = [(name, 7) for name in names]
    assert of_dead_runs(ours, 7, {"aaaa"}) == names[:2]
    assert of_dead_runs(ours, 7, set()) == []
    assert of_dead_runs([(name, 8) for name in names], 7, {"aaaa", "bbbb"}) == [], "another user's"


def test_a_start_removes_what_a_killed_process_left_and_nothing_of_a_living_one(holder: tuple) -> None:
    """Would not catch a folder on a file system without locks, where no run can start."""
    process, folder = holder
    segment = SEGMENTS / f"megatron_rl-{folder.name}-queue"
    orphan = subprocess.Popen(["sleep", "600"], env=os.environ | {RUN_ID: folder.name})
    first = Scratch.begin()
    assert (folder / "socket").exists() and segment.exists() and orphan.poll() is None
    process.kill()
    process.wait()
    second = Scratch.begin()
    assert not folder.exists() and not segment.exists()
    assert orphan.wait(60) == -9
    assert first.folder.exists() and first.folder.stat().st_mode & 0o777 == 0o700
    for held in (first, second):
        held.remove()
        held.remove()
    assert [path.name for path in folder.parent.iterdir()] == [".lock"]


def test_who_joins_keeps_the_folder(holder: tuple) -> None:
    """The last one to leave removes it. Would not catch a process that was killed while another joined."""
    process, folder = holder
    joined = Scratch.join(folder.name)
    process.kill()
    process.wait()
    other = Scratch.begin()
    assert (folder / "socket").exists()
    other.remove()
    joined.remove()
    assert not folder.exists()


def test_a_start_waits_for_another_one(place: Path) -> None:
    """Ten at once, of which each removes what is dead: each finds its own folder. Would not catch a rare race."""
    program = f"from megatron_rl.cluster import scratch; scratch.LONGEST_BASE = 1000{HOLDER}"
    env = os.environ | {"TMPDIR": str(place), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) for _ in range(10)]
    try:
        folders = [Path(process.stdout.readline().strip()) for process in processes]
        time.sleep(0.1)
        assert all((folder / "lock").exists() for folder in folders)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_logs_of_a_failed_run_are_kept_once(place: Path) -> None:
    """Would not catch logs of another node."""
    for text in ("first", "second"):
        held = Scratch.begin()
        logs = held.ray_folder / "session_2026" / "logs"
        logs.mkdir(parents=True)
        (logs / "worker.err").write_text(text)
        (held.folder / "rank_0_1.log").write_text(text)
        held.remove(keep_logs=True)
        assert not held.folder.exists()
    kept = held.folder.parent / scratch.LAST_FAILURE
    assert (kept / "rank_0_1.log").read_text() == "second"
    assert (kept / "worker.err").read_text() == "second" and kept.stat().st_mode & 0o777 == 0o700


def test_a_place_that_cannot_serve_is_passed_over_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long path goes to /tmp; a folder that others may enter is nobody's. Would not catch a full file system."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 10)))
    held = Scratch.begin()
    assert held.folder.is_relative_to("/tmp") and len(str(held.folder)) < 40
    held.remove()
    monkeypatch.setattr(scratch, "LONGEST_BASE", 3)
    with pytest.raises(ConfigError, match=r"no folder can hold .* sockets \(.*longer than the 3 bytes.*TMPDIR=/tmp"):
        Scratch.begin()
    monkeypatch.setattr(scratch, "LONGEST_BASE", 1000)
    base = tmp_path / f"megatron_rl-{os.getuid()}"
    base.mkdir(mode=0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held = Scratch.begin()
    assert held.folder.is_relative_to("/tmp") and not held.folder.is_relative_to(tmp_path)
    held.remove()
