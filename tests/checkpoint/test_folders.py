"""Checkpoint folders come and go. What a process leaves that dies in between: `test_every_instant`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from saved import save, write_files

from megatron_rl.checkpoint.folders import LATEST, commit, find, only_writer, remove_old, set_aside, step_folder, sweep
from megatron_rl.checkpoint.manifest import ManifestError, broken_files, read_manifest
from megatron_rl.errors import ConfigError


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def steps(root: Path) -> list[int]:
    return [found.step for found in find(root)]


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
    """The second one is there, the first is gone. Would not catch a moment between them."""
    save(tmp_path, 4, "first")
    save(tmp_path, 4, "second")
    assert "second" in (step_folder(tmp_path, 4) / "run.json").read_text()
    assert names(tmp_path) == {"global_step_4", LATEST}


def test_old_checkpoints_are_deleted(tmp_path):
    """The newest stay, and so does what has no manifest. Would not catch a folder that is in use elsewhere."""
    for step in (5, 10, 15):
        save(tmp_path, step)
    step_folder(tmp_path, 3).mkdir()
    assert remove_old(tmp_path, None) == remove_old(tmp_path, 2, spared=5) == []
    assert remove_old(tmp_path, 2) == [step_folder(tmp_path, 5)]
    assert names(tmp_path) == {"global_step_3", "global_step_10", "global_step_15", LATEST}
    assert remove_old(tmp_path, 2) == []


def test_sweeping_deletes_leftovers_only(tmp_path):
    """All kinds at once. Would not catch a leftover of a later version."""
    save(tmp_path, 1)
    write_files(tmp_path, 2)
    shutil.copytree(step_folder(tmp_path, 1), tmp_path / "global_step_1.replaced")
    shutil.copytree(step_folder(tmp_path, 1), tmp_path / "global_step_1.deleted")
    shutil.copytree(step_folder(tmp_path, 1), tmp_path / "global_step_5.replaced")
    set_aside_before = tmp_path / "global_step_9.set_aside"
    set_aside_before.mkdir()
    (tmp_path / LATEST).write_text("9")
    (tmp_path / f"{LATEST}.unfinished").write_text("")
    assert steps(tmp_path) == [5, 1]
    deleted = ["global_step_1.deleted", "global_step_1.replaced", "global_step_2.unfinished"]
    assert [path.name for path in sweep(tmp_path)] == deleted
    assert names(tmp_path) == {"global_step_1", "global_step_5.replaced", "global_step_9.set_aside", LATEST}
    assert (tmp_path / LATEST).read_text() == "1"
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
