"""Copies of trained state in shared memory: what is written, how much memory it takes, and who may read it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megatron_rl.errors import StorageError
from megatron_rl.roles.tensor_files import TYPES, PieceWriter, reserved_file

PEAK = """
import resource, sys, torch
from pathlib import Path
from megatron_rl.roles.tensor_files import PieceWriter
state = {str(number): torch.full((4 << 20,), number, dtype=torch.float32) for number in range(12)}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
PieceWriter().write(Path(sys.argv[1]), state, {})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


@pytest.mark.parametrize("is_staged", [False, True])
def test_safetensors_reads_what_was_written(tmp_path: Path, is_staged: bool) -> None:
    """Every kind of number, views, none and one, in pieces of seven bytes, which cut numbers; over two buffers in turn,
    too, as from a GPU. Would not catch a GPU's copy that has not ended.
    """
    tensors = {str(dtype): torch.arange(1, 6).to(dtype) for dtype in TYPES}
    tensors |= {"view": torch.arange(12.0).view(3, 4).t(), "none": torch.empty(0, 3), "one": torch.tensor(2.5)}
    PieceWriter(7, is_staged).write(tmp_path / "file", tensors, {"generators": 'a\n"b"'})
    read = load_file(tmp_path / "file")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (read[name], tensor)))
    with safe_open(tmp_path / "file", "pt") as content:
        assert content.metadata() == {"generators": 'a\n"b"'}


@pytest.mark.dist
def test_a_copy_takes_its_own_bytes_alone(tmp_path: Path) -> None:
    """201 MB on a CPU: the process has less than one piece more at its peak. Would not catch pinned buffers."""
    told = subprocess.run([sys.executable, "-c", PEAK, tmp_path / "file"], capture_output=True, text=True, check=True)
    size = (tmp_path / "file").stat().st_size
    assert size > 200e6 and int(told.stdout) < 64 << 20


def test_a_full_folder_is_a_sentence(tmp_path: Path) -> None:
    """A petabyte is refused before a byte is written, and leaves no file. Would not catch memory promised twice."""
    with pytest.raises(StorageError, match=r"needs 1125899.91 GB in .*GB free: .*try: a larger /dev/shm.*copy_freq=-1"):
        reserved_file(tmp_path / "file", 1 << 50)
    assert not list(tmp_path.iterdir())


def test_copies_are_this_users_alone(tmp_path: Path) -> None:
    """A rank's own and one from another node, where the user's other files are everybody's. Would not catch who may
    read the folder.
    """
    before = os.umask(0)
    try:
        PieceWriter().write(tmp_path / "own", {"weight": torch.ones(2)}, {})
        reserved_file(tmp_path / "received", 8).fill_(7)
        (tmp_path / "other").touch()
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == {"own": 0o600, "received": 0o600, "other": 0o666}
    assert (tmp_path / "received").read_bytes() == bytes([7] * 8)
