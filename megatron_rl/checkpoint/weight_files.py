"""Read the headers of a Hugging Face folder's safetensors files: which tensors there are, and which files are damaged.

A header says where each tensor is in its file, so a file that was cut off is noticed without reading it. Needs
neither torch nor safetensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.file_kinds import instead_of_file
from megatron_rl.config.json_files import UnreadableFileError, parsed_json, read_json_object

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MODEL_FILES = (".json", ".jinja", ".model", ".txt")
"""Endings of a Hugging Face folder's files other than weights."""
LARGEST_HEADER = 100_000_000
"""Bytes; what the safetensors library reads at most."""
MOST_NAMED = 3
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
}
"""Bits of an element; sizes of other types are not compared."""
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of weights. What is packed into others means nothing without scales."""
BYTES = "U8"
BLOCKS, SCALES = "_blocks", "_scales"
"""What follows a tensor's name in the names of the two tensors of bytes that it is stored as in 4 bits (`mxfp4.py`)."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: bytes [start, stop) of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file. Raises UnreadableFileError for a damaged header and for a file of another length."""
    lacks = instead_of_file(file)
    if lacks is not None:
        raise UnreadableFileError(f"{file.name} must be a file, and {lacks}")
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(LARGEST_HEADER, size - 8):
                raise UnreadableFileError(f"{file.name} has {size} bytes, which hold no header of safetensors")
            header = parsed_json(opened.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _stored(file, 8 + length, entry) for name, entry in entries.items()}
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise UnreadableFileError(f"{file.name} has a damaged header: {error!r:.200}") from error
    except OSError as error:
        raise UnreadableFileError(f"{file.name} cannot be read: {error.strerror}") from error
    end = max((tensor.stop for tensor in tensors.values()), default=8 + length)
    if size != end:
        cut = "it was cut off, copy it again" if size < end else "something follows its last tensor"
        raise UnreadableFileError(f"{file.name} has {size} bytes, and its header says {end}: {cut}")
    return tensors


def _stored(file: Path, data: int, entry: dict[str, Any]) -> StoredTensor:
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, stop)) or stop < start:
        raise ValueError(entry)
    bits = BITS.get(entry["dtype"])
    if bits is not None and (stop - start) * 8 != math.prod(shape) * bits:
        raise ValueError(entry)
    return StoredTensor(file, str(entry["dtype"]), shape, data + start, data + stop)


def odd_files(folder: Path) -> list[str]:
    """Entries of a model folder that should be files and are not; opening one could wait forever.

    Raises OSError.
    """
    named = sorted(file for file in folder.iterdir() if file.suffix in (*MODEL_FILES, ".safetensors"))
    kinds = [(file.name, instead_of_file(file)) for file in named]
    return [f"{name} must be a file, and {lacks}" for name, lacks in kinds if lacks is not None]


@dataclass(frozen=True)
class WeightFiles:
    """Names of the files that hold a folder's weights. index: tensor -> file, of a folder with an index."""

    files: list[str]
    index: dict[str, str] | None


def weight_files(folder: Path) -> WeightFiles:
    """The files that transformers reads: model.safetensors, else those of the index, else all.

    Raises UnreadableFileError for an index that cannot be read, for files that it names and that do not exist, and
    where model.safetensors and the index lead to two sets of weights.
    """
    has_one = (folder / WEIGHTS).exists()
    if not (folder / INDEX).exists():
        files = [WEIGHTS] if has_one else sorted(file.name for file in folder.glob("*.safetensors"))
        return WeightFiles(files, None)
    names = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise UnreadableFileError(f"{INDEX} has no weight_map of tensors to files")
    files = sorted(set(names.values()))
    absent = [file for file in files if not (folder / file).exists()]
    if absent:
        raise UnreadableFileError(f"{INDEX} names files that are missing: {some_of(absent)}")
    if has_one and files != [WEIGHTS]:
        rule = "transformers reads the former and vLLM the latter: remove the one that is not meant"
        raise UnreadableFileError(f"{WEIGHTS} exists, and {INDEX} names other files ({some_of(files)}); {rule}")
    return WeightFiles(files, names)


def read_weight_files(folder: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Name -> tensor of the files that `weight_files` names; and everything that is wrong."""
    try:
        named = weight_files(folder)
    except UnreadableFileError as error:
        return {}, [str(error)]
    faults: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    for file in named.files:
        try:
            further = read_header(folder / file)
        except UnreadableFileError as error:
            faults.append(str(error))
            continue
        twice = [name for name in further if name in tensors]
        if twice:
            faults.append(f"{file} holds what {tensors[twice[0]].file.name} holds, too: {some_of(twice)}")
        tensors |= further
    if named.index is not None and not faults:
        lost = [
            name
            for name, file in named.index.items()
            if name not in tensors or tensors[name].file.name != Path(file).name
        ]
        if lost:
            faults.append(f"{INDEX} names tensors that are not in their files: {some_of(lost)}")
    return tensors, faults


def type_faults(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Faults of the types of weights: one sentence that names the first, or none."""
    odd = [name for name, tensor in tensors.items() if tensor.dtype not in FLOATS]
    if not odd:
        return []
    first, rest = tensors[odd[0]], f" (and {len(odd) - 1} more tensors)" if len(odd) > 1 else ""
    rule = f"weights must be of type {', '.join(FLOATS)}, and quantised ones be unpacked to one of these first"
    return [f"{odd[0]} in {first.file.name} is of type {first.dtype}{rest}: {rule}"]


def stored_names(name: str) -> tuple[str, str]:
    """The two tensors that a tensor is stored as in 4 bits."""
    return name + BLOCKS, name + SCALES


def some_of(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
