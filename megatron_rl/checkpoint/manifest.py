"""A checkpoint's manifest: its files with size and checksum, and the identities of its models.

It is written last, so a folder that has one was complete when it was written. Needs neither torch nor Megatron.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_rl.checkpoint.durable import sync, write_text
from megatron_rl.config.file_kinds import ABSENT, instead_of_file

FORMAT = 4
"""The format this version writes, and the only one it reads."""
MANIFEST = "manifest.json"
PROJECT = "megatron_rl"
THREADS = min(16, 2 * (os.cpu_count() or 1))
"""Files read at once: more than cores, because hashing waits for the disk as well."""


class ManifestError(Exception):
    """A folder is no complete checkpoint; the message is the reason, without the folder."""


class OtherFormatError(ManifestError):
    """The folder is a complete checkpoint that this version cannot read."""


@dataclass(frozen=True)
class FileRecord:
    """One file as it was written: bytes, and the hexadecimal SHA-256 of its content."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Contents of the checkpoint of `step`.

    models: role -> `model_identity` of its config.json. files: path relative to the folder, with "/" -> record.
    """

    format: int
    step: int
    models: dict[str, dict[str, Any]]
    files: dict[str, FileRecord]

    def to_json(self) -> str:
        """Text that `from_json` turns back into an equal manifest."""
        return json.dumps({"project": PROJECT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse a manifest. Raises ManifestError with the reason, OtherFormatError if another version may read it."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{MANIFEST} is not JSON: {error}") from error
        project = content.get("project") if isinstance(content, dict) else None
        if project != PROJECT:
            raise OtherFormatError(f"{MANIFEST} is of another project ({project!r}, not {PROJECT!r})")
        if content.get("format") != FORMAT:
            raise OtherFormatError(f"{MANIFEST} has format {content.get('format')!r}; this version reads {FORMAT}")
        try:
            files = {name: FileRecord(**record) for name, record in content["files"].items()}
            models = {role: dict(identity) for role, identity in content["models"].items()}
            manifest = cls(FORMAT, int(content["step"]), models, files)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ManifestError(f"{MANIFEST} is damaged: {error!r}") from error
        outside = [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
        if outside:
            raise ManifestError(f"{MANIFEST} names files outside of its folder: {', '.join(outside)}")
        return manifest


def model_identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a Hugging Face config.json that decide whether weights fit; missing keys get their defaults."""
    heads, hidden_size = settings.get("num_attention_heads"), settings.get("hidden_size")
    # transformers writes either name, depending on its version.
    num_experts = settings.get("num_experts") or settings.get("num_local_experts") or 0
    return {
        "architectures": list(settings.get("architectures") or ()),
        "hidden_size": hidden_size,
        "num_hidden_layers": settings.get("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.get("num_key_value_heads") or heads,
        "head_dim": settings.get("head_dim") or (hidden_size // heads if hidden_size and heads else None),
        "intermediate_size": settings.get("intermediate_size"),
        "vocab_size": settings.get("vocab_size"),
        "tie_word_embeddings": bool(settings.get("tie_word_embeddings", False)),
        "num_experts": num_experts,
        "moe_intermediate_size": settings.get("moe_intermediate_size") if num_experts else None,
    }


def digest_files(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Records of the files `names` below `folder`; their content is on the disk when this returns. Raises OSError."""
    names = list(names)
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _digest(folder / name, durable=True), names), strict=True))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest atomically, after the names of all files are on the disk. Raises OSError."""
    for inner in folder.rglob("*"):
        if inner.is_dir():
            sync(inner)
    write_text(folder / MANIFEST, manifest.to_json())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder. Raises ManifestError with the reason if it cannot be used."""
    lacks = instead_of_file(folder / MANIFEST)
    if lacks == ABSENT:
        raise ManifestError(f"it has no {MANIFEST}: torn, or not written by {PROJECT}")
    if lacks is not None:
        raise ManifestError(f"{MANIFEST} must be a file, and {lacks}")
    try:
        text = (folder / MANIFEST).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{MANIFEST} cannot be read: {error}") from error
    return Manifest.from_json(text)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a manifest of this project's, of whatever format, by its first bytes. Raises OSError."""
    file = folder / MANIFEST
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return f'"project": "{PROJECT}"'.encode() in opened.read(100)


def broken_files(folder: Path, manifest: Manifest, checksums: bool) -> list[str]:
    """Every file that differs from the manifest, with the reason; contents are compared only with `checksums`."""

    def fault(name: str, record: FileRecord) -> str | None:
        file = folder / name
        try:
            lacks = instead_of_file(file)
            if lacks is not None and lacks != ABSENT:
                return f"{name} must be a file, and {lacks}"
            size = file.stat().st_size
            if size != record.size:
                return f"{name} has {size} bytes, not {record.size}"
            if checksums and _digest(file, durable=False) != record:
                return f"{name} has other content than was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error}"
        return None

    with ThreadPoolExecutor(THREADS) as pool:
        faults = pool.map(fault, manifest.files.keys(), manifest.files.values())
        return [each for each in faults if each is not None]


def _digest(file: Path, durable: bool) -> FileRecord:
    with file.open("rb") as opened:
        if durable:
            os.fsync(opened.fileno())
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return FileRecord(opened.tell(), digest)
