"""Find what a pickle would import if it were loaded, without loading it.

A pickle can call whatever it can name. Pickles of a checkpoint name little, so everything else is refused: other names,
names put together during loading, and files that `torch.save` did not write. Needs neither torch nor Megatron.

Two kinds: `.metadata` is a plain pickle; `*.pt` is torch's zip archive with the pickle in `data.pkl`. Objects inside
the `*.distcp` files are left to torch's own restricted loader, which `roles.environment` switches on for all loading.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METADATA = ".metadata"
DCP = "torch.distributed.checkpoint"
# Called with any arguments, or given any attributes, these do nothing but make values.
HARMLESS = frozenset(
    [
        "__builtin__ set",
        "_codecs encode",
        "collections OrderedDict",
        "pathlib PosixPath",
        "torch Size",
        "torch._utils _rebuild_tensor_v2",
        "torch.serialization _get_layout",
        f"{DCP}.filesystem _StorageInfo",
        *(
            f"{DCP}.metadata {name}"
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        *(f"{DCP}.planner {name}" for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")),
        *(f"torch {dtype}" for dtype in "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64".split()),
        *(f"torch {dtype}" for dtype in "float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2".split()),
        *(
            f"torch {kind}Storage"
            for kind in "Bool Byte Char Short Int Long Half BFloat16 Float Double Untyped".split()
        ),
    ]
)
"""Everything the pickles of a checkpoint may name, as "module name"."""

STRINGS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}
READ_MEMO, WRITE_MEMO = {"GET", "BINGET", "LONG_BINGET"}, {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
NO_EFFECT = {"PROTO", "FRAME"}
EXTENSIONS = {"EXT1", "EXT2", "EXT4"}
"""Opcodes, by what they do to the stack."""

ARCHIVE_END = struct.Struct("<4s36xQQ4s4xQ4x4s16xH")
"""The last 98 bytes of torch's archives: signature, size and place of the directory; signature and place of this
record; signature, length of a comment."""


def pickles_in(folder: Path) -> list[Path]:
    """All files of a checkpoint that are loaded as pickles, in order."""
    return sorted(file for file in folder.rglob("*") if file.name == METADATA or file.suffix == ".pt")


def forbidden_globals(path: Path) -> set[str]:
    """Forbidden imports of the pickle in `path`: dotted names, and in <> those that cannot be known beforehand.

    Empty for the `.metadata` and `common.pt` of our checkpoints. Nothing is executed. Raises OSError.
    """
    data = path.read_bytes()
    names = set()
    try:
        pickle = data if path.name == METADATA else _pickle_of_archive(data)
        for name in _globals_of(pickle):
            if name not in HARMLESS:
                names.add(name if name.startswith("<") else name.replace(" ", "."))
    except (ValueError, zipfile.BadZipFile) as error:
        names.add(f"<not a file of this kind: {error}>")
    return names


def _globals_of(pickle: bytes) -> Iterator[str]:
    """Every global, as "module name". Raises ValueError where the opcodes cannot be followed.

    The names of STACK_GLOBAL are known when the two opcodes before it push known strings; memo writes do not matter.
    """
    memo: dict[Any, str | None] = {}
    pushed: list[str | None] = []
    for opcode, argument, _ in pickletools.genops(pickle):
        if opcode.name in STRINGS:
            pushed.append(argument)
        elif opcode.name in READ_MEMO:
            pushed.append(memo.get(argument))
        elif opcode.name in WRITE_MEMO:
            memo[len(memo) if argument is None else argument] = pushed[-1] if pushed else None
        elif opcode.name not in NO_EFFECT:
            if opcode.name in ("GLOBAL", "INST"):
                yield str(argument)
            elif opcode.name == "STACK_GLOBAL":
                known = [name for name in pushed[-2:] if name is not None]
                yield " ".join(known) if len(known) == 2 else "<a name put together while loading>"
            elif opcode.name in EXTENSIONS:
                yield f"<extension {argument}>"
            pushed.clear()


def _pickle_of_archive(data: bytes) -> bytes:
    """The one pickle in what `torch.save` wrote. Raises ValueError or BadZipFile where a reader could see another."""
    if len(data) < ARCHIVE_END.size or data[:4] != b"PK\x03\x04":
        raise ValueError("not an archive of torch.save")
    # Readers look for the directory in different ways; when it is where torch.save puts it, all find the same one.
    end = len(data) - ARCHIVE_END.size
    directory, size, start, locator, place, last, comment = ARCHIVE_END.unpack(data[end:])
    if (directory, locator, last) != (b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06") or comment:
        raise ValueError("not an archive of torch.save: its end is another one")
    if (place, start + size) != (end, end):
        raise ValueError("not an archive of torch.save: its directory is elsewhere")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        # torch compares names without their case.
        members = [member for member in archive.infolist() if member.filename.casefold().endswith(".pkl")]
        if len(members) != 1 or not members[0].filename.endswith("/data.pkl") or members[0].compress_type:
            names = ", ".join(member.filename for member in members) or "none"
            raise ValueError(f"not an archive of torch.save: it must have one data.pkl, uncompressed, and has {names}")
        return archive.read(members[0])
