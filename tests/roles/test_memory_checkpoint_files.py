"""Who may read the copies of trained state that lie in shared memory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_rl.roles.memory_checkpoint import mapped


def test_copies_are_this_users_alone(tmp_path: Path) -> None:
    """A rank's own and one from another node, where the user's other files are everybody's. Would not catch the moment
    before the library that writes the first has set its mode.
    """
    before = os.umask(0)
    try:
        save_file({"weight": torch.ones(2)}, tmp_path / "own")
        mapped(tmp_path / "received", 8).fill_(7)
        (tmp_path / "other").touch()
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == {"own": 0o600, "received": 0o600, "other": 0o666}
    assert (tmp_path / "received").read_bytes() == bytes([7] * 8)
