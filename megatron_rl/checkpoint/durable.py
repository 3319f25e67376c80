"""Writing so that a power cut or `kill -9` leaves either the old file or the new one."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(file: Path, text: str) -> None:
    """Replace `file` at one instant; the text is on the disk when this returns. Raises OSError."""
    unfinished = file.with_name(file.name + ".unfinished")
    unfinished.write_text(text)
    sync(unfinished)
    unfinished.replace(file)
    sync(file.parent)
