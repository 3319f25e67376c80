"""Writing so that a power cut or `kill -9` leaves either the old file or the new one."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_rl.observe.appended_file import new_file


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(file: Path, text: str) -> None:
    """Replace a file, or a link, at one instant; the text is on the disk when this returns. Raises OSError."""
    unfinished = file.with_name(file.name + ".unfinished")
    with new_file(unfinished) as opened:
        opened.write(text.encode())
        opened.flush()
        os.fsync(opened.fileno())
    unfinished.replace(file)
    sync(file.parent)
