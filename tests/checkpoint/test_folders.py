"""Checkpoint folders come and go; a process that dies at any instant leaves nothing that only looks complete."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from saved import save, write_files

from megatron_rl.checkpoint.folders import LATEST, commit, find, only_writer, remove_old, set_aside, step_folder, sweep
from megatron_rl.checkpoint.manifest import ManifestError, broken_files, read_manifest
from megatron_rl.errors import ConfigError

CHANGES_THE_DISK = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def steps(root: Path) -> list[int]:
    return [found.step for found in find(root)]


def run_until(limit: int, action: Callable[[], object]) -> bool:
    """Run `action` in a child that dies, as by kill -9, before its `limit`-th change of the disk; whether it ended."""
    pid = os.fork()
    if not pid:
        count = 0

        def die(event: str, _: tuple) -> None:
            nonlocal count
            count += event in CHANGES_THE_DISK
            if count > limit:
                os._exit(9)

        sys.addaudithook(die)
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def assert_all_complete(folders: list[Path]) -> None:
    for folder in folders:
        assert broken_files(folder, read_manifest(folder), checksums=True) == []


def test_a_commit_is_found_newest_first(tmp_path):
    """Numbers, not names, are compared. Would not catch a folder of ours that was renamed by hand."""
    assert find(tmp_path / "none") == []
    for step in (2, 10, 9):
        assert save(tmp_path, step) == step_folder(tmp_path, step)
    for other in ("global_step_011", "global_step_x", "global_step_12.unfinished", "global_step_13.deleted"):
        (tmp_path / other).mkdir()
    (tmp_path / "global_step_14").touch()
    assert steps(tmp_path) == [10, 9, 2]
    assert (tmp_path / LATEST).read_text() == "9"


def test_a_commit_with_a_file_too_short_is_refused(tmp_path):
    """A rank that wrote less than it said. Would not catch a wrong byte; loading does."""
    folder, manifest = write_files(tmp_path, 1)
    os.truncate(folder / "run.json", 1)
    with pytest.raises(ManifestError, match="run.json has 1 bytes, not"):
        commit(folder, manifest)
    assert steps(tmp_path) == []


def test_a_step_is_replaced(tmp_path):
    """The second one is there, the first is gone. Would not catch a moment between them; the next test does."""
    save(tmp_path, 4, "first")
    save(tmp_path, 4, "second")
    assert "second" in (step_folder(tmp_path, 4) / "run.json").read_text()
    assert names(tmp_path) == {"global_step_4", LATEST}


@pytest.mark.parametrize("replaces", [False, True])
def test_kill_at_any_instant_of_a_commit(tmp_path, replaces):
    """Before each change of the disk. Would not catch what a power cut does to changes that were not synced."""
    for limit in range(200):
        root = tmp_path / str(limit)
        save(root, 3)
        if replaces:
            save(root, 4, "first")
        folder, manifest = write_files(root, 4, "second")
        ended = run_until(limit, lambda folder=folder, manifest=manifest: commit(folder, manifest))
        assert steps(root) in ([[4, 3]] if replaces or ended else [[4, 3], [3]])
        assert_all_complete([found.path for found in find(root)])
        assert_all_complete([folder for step in (3, 4) if (folder := step_folder(root, step)).exists()])
        before = steps(root)
        sweep(root)
        assert steps(root) == before
        assert len(names(root) - {LATEST}) == len(before) and not list(root.glob("*.unfinished"))
        assert_all_complete([found.path for found in find(root)])
        if ended:
            break
    assert ended and limit > 5


def test_old_checkpoints_are_deleted(tmp_path):
    """The newest stay, and so does what has no manifest. Would not catch a folder that is in use elsewhere."""
    for step in (5, 10, 15):
        save(tmp_path, step)
    step_folder(tmp_path, 3).mkdir()
    assert remove_old(tmp_path, None) == []
    assert remove_old(tmp_path, 2) == [step_folder(tmp_path, 5)]
    assert names(tmp_path) == {"global_step_3", "global_step_10", "global_step_15", LATEST}
    assert remove_old(tmp_path, 2) == []


def test_kill_at_any_instant_of_a_deletion(tmp_path):
    """Nothing half deleted is found, and the next run clears it. Would not catch a slow deletion by another host."""
    for limit in range(200):
        root = tmp_path / str(limit)
        for step in (1, 2, 3):
            save(root, step)
        ended = run_until(limit, lambda root=root: remove_old(root, 1))
        assert_all_complete([found.path for found in find(root)])
        assert steps(root)[0] == 3
        sweep(root)
        assert remove_old(root, 1) is not None and names(root) == {"global_step_3", LATEST}
        if ended:
            break
    assert ended and limit > 10


def test_sweeping_deletes_leftovers_only(tmp_path):
    """All kinds at once. Would not catch a leftover of a later version."""
    save(tmp_path, 1)
    write_files(tmp_path, 2)
    shutil.copytree(step_folder(tmp_path, 1), tmp_path / "global_step_1.replaced")
    shutil.copytree(step_folder(tmp_path, 1), tmp_path / "global_step_1.deleted")
    shutil.copytree(step_folder(tmp_path, 1), tmp_path / "global_step_5.replaced")
    set_aside_before = tmp_path / "global_step_9.set_aside"
    set_aside_before.mkdir()
    assert steps(tmp_path) == [5, 1]
    deleted = ["global_step_1.deleted", "global_step_1.replaced", "global_step_2.unfinished"]
    assert [path.name for path in sweep(tmp_path)] == deleted
    assert names(tmp_path) == {"global_step_1", "global_step_5.replaced", "global_step_9.set_aside", LATEST}
    save(tmp_path, 5)
    assert names(tmp_path) == {"global_step_1", "global_step_5", "global_step_9.set_aside", LATEST}
    assert sweep(tmp_path / "none") == []


def test_later_checkpoints_step_aside_and_are_never_overwritten(tmp_path):
    """Three times the same step. Would not catch a user who renames one back."""
    for text in ("first", "second", "third"):
        for step in (5, 10, 15):
            save(tmp_path, step, text)
        renamed = set_aside(tmp_path, 5)
        assert [old.name for old, _ in renamed] == ["global_step_15", "global_step_10"]
        assert text in (renamed[0][1] / "run.json").read_text()
        assert (tmp_path / LATEST).read_text() == "5"
    assert {"global_step_15.set_aside", "global_step_15.set_aside.2", "global_step_15.set_aside.3"} <= names(tmp_path)
    assert steps(tmp_path) == [5] and sweep(tmp_path) == [] and set_aside(tmp_path, 5) == []
    set_aside(tmp_path, 0)
    assert steps(tmp_path) == [] and LATEST not in names(tmp_path)


def test_kill_at_any_instant_of_setting_aside(tmp_path):
    """All folders stay whole. Would not catch a later run that goes on from one that was to be set aside."""
    for limit in range(200):
        root = tmp_path / str(limit)
        for step in (1, 2, 3):
            save(root, step)
        ended = run_until(limit, lambda root=root: set_aside(root, 1))
        assert_all_complete(list(root.glob("global_step_*")))
        assert len(list(root.glob("global_step_*"))) == 3
        latest = int((root / LATEST).read_text())
        assert latest in steps(root)
        if ended:
            break
    assert ended and limit > 1


def test_one_run_at_a_time(tmp_path):
    """Would not catch a file system that has no locks."""
    with only_writer(tmp_path), pytest.raises(ConfigError, match="another run is writing"), only_writer(tmp_path):
        pass
    with only_writer(tmp_path):
        pass


def test_a_checkpoint_behind_a_link_is_only_unlinked(tmp_path):
    """A user has moved it to another disk. Would not catch a link inside of a checkpoint."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for step in (5, 10, 15):
        save(tmp_path, step)
    for step in (5, 10):
        step_folder(tmp_path, step).rename(elsewhere / str(step))
        step_folder(tmp_path, step).symlink_to(elsewhere / str(step))
    assert steps(tmp_path) == [15, 10, 5]
    assert remove_old(tmp_path, 2) == [step_folder(tmp_path, 5)] and steps(tmp_path) == [15, 10]
    save(tmp_path, 10, "again")
    assert not step_folder(tmp_path, 10).is_symlink()
    assert_all_complete([elsewhere / "5", elsewhere / "10", step_folder(tmp_path, 10)])
    assert not list(tmp_path.glob("*.deleted"))
