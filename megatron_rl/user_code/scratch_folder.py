"""Remove what a confined program has left."""

from __future__ import annotations

import os
from pathlib import Path


def remove_folder(folder: Path) -> None:
    """Remove a folder of any depth: inner content moves up to the folder itself, so that no path gets long.

    Links are not followed.
    """
    number = 0
    while names := os.listdir(folder):
        for name in names:
            inner = folder / name
            if inner.is_symlink() or not inner.is_dir():
                inner.unlink(missing_ok=True)
                continue
            inner.chmod(0o700)
            for held in os.listdir(inner):
                number += 1
                (inner / held).rename(folder / f"moved.{number}")
            inner.rmdir()
    folder.rmdir()
