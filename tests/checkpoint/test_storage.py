"""What a disk that takes no more looks like: one sentence, and nothing that only looks complete."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from full_disk import full_disk
from saved import save, write_files

from megatron_rl.checkpoint.folders import LOCK, commit, find, only_writer
from megatron_rl.checkpoint.hf_folder import save_tensors
from megatron_rl.checkpoint.storage import storing, writing
from megatron_rl.errors import ConfigError, StorageError, WorkerFailure

OTHER_ERRORS = [
    ValueError("no such rule"),
    ConnectionResetError("reset"),
    TimeoutError("late"),
    WorkerFailure("rank 1 raised RuntimeError in step: [Errno 28] of a reward"),
]


def write_tensors(file: Path) -> None:
    save_tensors({"x": torch.zeros(10_000)}, file)


def write_with_torch(file: Path) -> None:
    torch.save(torch.zeros(10_000), file)


def write_with_torch_to_a_stream(file: Path) -> None:
    with file.open("wb") as stream:
        torch.save(torch.zeros(10_000), stream)


def write_text(file: Path) -> None:
    file.write_text("x" * 10_000)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (write_tensors, "I/O error: File too large (os error 27)"),
        (write_with_torch, "a file could not be written in full"),
        (write_with_torch_to_a_stream, "File too large"),
        (write_text, "File too large"),
    ],
)
def test_every_writer_says_that_the_disk_is_full(tmp_path, write, reason):
    """Python, torch and safetensors. Would not catch a library that ignores the system's answer."""
    with full_disk(1000), pytest.raises(StorageError) as raised, writing():
        write(tmp_path / "file")
    assert reason in str(raised.value) and "\n" not in str(raised.value)
    with writing():
        write(tmp_path / "file")


def test_the_sentence_names_folder_free_bytes_and_the_last_checkpoint(tmp_path):
    """A commit that fails, without and with an earlier checkpoint. Would not catch a disk that another one mirrors."""
    for step, last in ((1, "there is no complete checkpoint"), (2, "the last complete checkpoint is global_step_1")):
        folder, manifest = write_files(tmp_path, step)
        with full_disk(10), pytest.raises(StorageError) as raised, storing(f"global_step_{step}", tmp_path):
            commit(folder, manifest)
        message = str(raised.value)
        assert message.startswith(f"global_step_{step} could not be written to {tmp_path}: File too large")
        free, total = shutil.disk_usage(tmp_path).free, shutil.disk_usage(tmp_path).total
        assert f" of {total:,} bytes are free there; {last}" in message and "\n" not in message
        assert abs(int(message.split(" of ")[0].split()[-1].replace(",", "")) - free) < 1e9
        assert [found.step for found in find(tmp_path)] == [1][: step - 1]
        save(tmp_path, 1)


def test_free_bytes_are_those_of_the_failure(tmp_path, monkeypatch):
    """Of a disk of 1,000 bytes: before what is half written goes, and before a file that its writer takes away itself.

    Once in a sentence, by whoever was nearest. Would not catch another process that frees some at that moment.
    """
    half = tmp_path / "half"

    def usage(_):
        used = sum(file.stat().st_size for file in tmp_path.rglob("*"))
        return shutil._ntuple_diskusage(1000, used, 1000 - used)

    def write_half():
        try:
            with writing(tmp_path):
                half.write_bytes(bytes(600))
                raise OSError(28, "No space left on device")
        finally:
            half.unlink()

    monkeypatch.setattr("megatron_rl.checkpoint.storage.shutil.disk_usage", usage)
    with pytest.raises(StorageError) as raised, storing("x", tmp_path):
        write_half()
    assert "No space left on device; 400 of 1,000 bytes are free there; there is no" in str(raised.value)
    half.write_bytes(bytes(300))
    with full_disk(500), pytest.raises(StorageError) as raised, storing("x", tmp_path), writing(tmp_path):
        save_tensors({"x": torch.zeros(250), "y": torch.zeros(1)}, tmp_path / "some.safetensors")
    assert "; 700 of 1,000 bytes are free there, and some.safetensors has 1,004; there is no" in str(raised.value)
    assert str(raised.value).count("bytes are free") == 1


def test_the_last_checkpoint_is_one_that_is_whole(tmp_path):
    """A newer one has lost a file. Would not catch a changed byte: there is no time to read all of them."""
    save(tmp_path, 1)
    (save(tmp_path, 2) / "run.json").unlink()
    with pytest.raises(StorageError, match="last complete checkpoint is global_step_1"), storing("x", tmp_path):
        raise OSError(28, "No space left on device")


def test_a_folder_that_has_gone_is_told(tmp_path):
    """Its free bytes are those of what is left of its path. Would not catch a mount that has gone."""
    with pytest.raises(StorageError) as raised, storing("x", tmp_path / "run"):
        (tmp_path / "run/file").write_text("")
    assert f"No such file or directory: {tmp_path}/run/file; " in str(raised.value)
    assert "bytes are free there; there is no complete checkpoint" in str(raised.value)


@pytest.mark.parametrize("error", OTHER_ERRORS)
def test_other_errors_stay_what_they_are(tmp_path, error):
    """Would not catch a fault of ours that is an OSError."""
    for context in (writing(), storing("x", tmp_path)):
        with pytest.raises(type(error)) as raised, context:
            raise error
        assert raised.value is error


def test_a_ranks_reason_is_kept_and_its_company_left_out(tmp_path):
    """The first line of several. Would not catch two ranks that fail differently."""
    told = "rank 1 (checkpoint), in finish_save: No space left on device"
    with pytest.raises(StorageError) as raised, storing("global_step_3", tmp_path):
        raise StorageError(f"{told}\n1 other rank(s) failed after it: 0")
    assert f"{tmp_path}: {told}; " in str(raised.value)


def test_a_run_takes_its_deleted_folder_again(tmp_path):
    """Folder, or lock alone; not where another run has it by now. Would not catch a folder that was renamed."""
    root = tmp_path / "runs" / "one"
    root.mkdir(parents=True)
    with only_writer(root) as lock:
        assert not lock.hold_again()
        shutil.rmtree(root.parent)
        assert lock.hold_again() and not lock.hold_again() and root.is_dir()
        (root / LOCK).unlink()
        assert lock.hold_again() and not lock.hold_again()
        with pytest.raises(ConfigError, match="another run is writing"), only_writer(root):
            pass
        shutil.rmtree(root)
        root.mkdir()
        with only_writer(root), pytest.raises(ConfigError, match="another run is writing"):
            lock.hold_again()


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_weights_have_the_mode_of_all_other_files(tmp_path, umask):
    """By the umask. Would not catch a file system that has access lists instead."""
    files = [tmp_path / "weights.safetensors", tmp_path / "other"]
    before = os.umask(umask)
    try:
        save_tensors({"x": torch.zeros(3)}, files[0])
        files[1].touch()
    finally:
        os.umask(before)
    modes = [file.stat().st_mode & 0o777 for file in files]
    assert modes == [0o666 & ~umask] * 2


def test_a_deleted_folder_comes_back_behind_its_link(tmp_path):
    """Would not catch a link that was deleted with it: then a folder is made in its place."""
    (tmp_path / "target").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "target")
    with only_writer(tmp_path / "run") as lock:
        shutil.rmtree(tmp_path / "target")
        assert lock.hold_again() and (tmp_path / "target").is_dir() and (tmp_path / "run").is_symlink()
