"""Pictures of samples on the page: only those that a run wrote in its own folder, encoded by itself."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.file_kinds import FILE, kind_of

FOLDER = "images"
DIGEST = re.compile(r"[0-9a-f]{32}")
PNG = b"\x89PNG\r\n\x1a\n"
LARGEST, MOST_BYTES = 4 << 20, 32 << 20
"""Bytes of a picture, and of all on a page."""


def digests_of(details: Mapping[str, Any]) -> list[str]:
    """Return the names of the images in a row of a table; names that no run writes are left out."""
    named = details.get("images")
    names = named if isinstance(named, list) else []
    return [name for name in names if isinstance(name, str) and DIGEST.fullmatch(name)]


def pictures_of(folder: Path, samples: Iterable[Mapping[str, Any]], room: int = MOST_BYTES) -> dict[str, str]:
    """Return digest -> PNG in base64 of the images of samples, up to `room` bytes. folder: the run."""
    pictures: dict[str, str] = {}
    for digest in dict.fromkeys(name for sample in samples for name in sample.get("images", ())):
        content = png_in(folder / FOLDER, f"{digest}.png")
        if content is not None and len(content) <= room:
            room -= len(content)
            pictures[digest] = base64.b64encode(content).decode()
    return pictures


def png_in(folder: Path, name: str) -> bytes | None:
    """Return a PNG file of a folder; None for one that is not there, is a link elsewhere, too large, or no PNG."""
    file = folder / name
    try:
        if kind_of(file) != FILE or folder.is_symlink() or file.is_symlink() or file.stat().st_size > LARGEST:
            return None
        content = file.read_bytes()
    except OSError:
        return None
    return content if content.startswith(PNG) else None
