"""SHA-256 of a model folder's files, where its user has written them down in SHA256SUMS (`sha256sum * > SHA256SUMS`).

The list is the user's statement which files these are. A start reads every listed file and refuses another one. Needs
neither torch nor Megatron.
"""

from __future__ import annotations

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

LIST = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64}) [ *](\S.*)")
READ = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*", "vocab.*")
"""Patterns of files that a run reads. Each must be in the list, or a file next to it could take its place."""
SHOWN = 12
"""Hexadecimal digits of a digest in a message, of 64."""


def listed_digests(folder: Path) -> dict[str, str]:
    """Name -> digest, of the list; empty without a list, and for a line that is none. Raises OSError."""
    lines = (folder / LIST).read_text().splitlines() if (folder / LIST).is_file() else []
    matches = (LINE.fullmatch(line) for line in lines)
    return {match[2].removeprefix("./"): match[1] for match in matches if match}


def unlike_the_list(folder: Path) -> list[str]:
    """Return sentences about files that are not what the list says; none without a list. Reads every listed file."""
    if not (folder / LIST).is_file():
        return []
    try:
        listed = listed_digests(folder)
        read = {file.name for pattern in READ for file in folder.glob(pattern)}
        unlisted = ", ".join(sorted(read - listed.keys()))
        faults = [f"{LIST} does not list {unlisted}"] if unlisted else []
        missing = [name for name in listed if not (folder / name).is_file()]
        faults += [f"{name} of {LIST} is missing" for name in missing]
        there = sorted(listed.keys() - set(missing))
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:  # hashing lets other threads run
            digests = threads.map(lambda name: digest_of(folder / name), there)
            for name, digest in zip(there, digests, strict=True):
                if digest != listed[name]:
                    said = f"{LIST} says {listed[name][:SHOWN]}..."
                    faults.append(f"{name} has the SHA-256 {digest[:SHOWN]}..., and {said}: copy it again")
    except OSError as error:
        return [f"{LIST} cannot be compared: {error}"]
    return faults


def digest_of(file: Path) -> str:
    """SHA-256 of a whole file, read once for all roles that have it. Raises OSError."""
    status = file.stat()
    return _digest(file, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _digest(file: Path, *_state: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
