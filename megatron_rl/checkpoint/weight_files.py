"""The safetensors files of a Hugging Face folder by their headers alone: which tensors there are, and what is damaged.

A header says where each tensor lies in its file, so a file that was cut off is noticed without reading it. Needs
neither torch nor safetensors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000
"""Bytes; what the safetensors library reads at most."""
LARGEST_JSON = 256 << 20
"""Bytes of a JSON file that is read whole; tokenizers have up to about 35 MB."""
MOST_NAMED = 3
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
}
"""Bits of an element; sizes of other types are not compared."""


class WeightFileError(Exception):
    """A file that cannot be read; the message is the reason, beginning with the file's name."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: bytes [start, stop) of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_json(file: Path) -> Any:
    """The content of a JSON file. Raises WeightFileError where it cannot be read."""
    try:
        size = file.stat().st_size
        if size > LARGEST_JSON:
            raise WeightFileError(f"{file.name} has {size} bytes, and at most {LARGEST_JSON} are read")
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise WeightFileError(f"{file.name} is not valid JSON: {error}") from error
    except OSError as error:
        raise WeightFileError(f"{file.name} cannot be read: {error.strerror}") from error


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file. Raises WeightFileError for a damaged header and for a file of another length."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(LARGEST_HEADER, size - 8):
                raise WeightFileError(f"{file.name} has {size} bytes, which hold no header of safetensors")
            header = json.loads(opened.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _stored(file, 8 + length, entry) for name, entry in entries.items()}
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise WeightFileError(f"{file.name} has a damaged header: {error!r:.200}") from error
    except OSError as error:
        raise WeightFileError(f"{file.name} cannot be read: {error.strerror}") from error
    end = max((tensor.stop for tensor in tensors.values()), default=8 + length)
    if size != end:
        cut = "it was cut off" if size < end else "something follows its last tensor"
        raise WeightFileError(f"{file.name} has {size} bytes, and its header says {end}: {cut}")
    return tensors


def _stored(file: Path, data: int, entry: dict[str, Any]) -> StoredTensor:
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, stop)) or stop < start:
        raise ValueError(entry)
    bits = BITS.get(entry["dtype"])
    if bits is not None and (stop - start) * 8 != math.prod(shape) * bits:
        raise ValueError(entry)
    return StoredTensor(file, str(entry["dtype"]), shape, data + start, data + stop)


def read_weight_files(folder: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Name -> tensor of the folder's files, as its index says or else of all of them; and everything that is wrong."""
    index, faults = folder / INDEX, []
    names: dict[str, str] | None = None
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    if index.exists():
        try:
            names = read_json(index)["weight_map"]
            if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
                raise TypeError(names)
        except WeightFileError as error:
            return {}, [str(error)]
        except (KeyError, TypeError):
            return {}, [f"{INDEX} has no weight_map of tensors to files"]
        files = sorted(set(names.values()))
        absent = [file for file in files if not (folder / file).is_file()]
        if absent:
            faults.append(f"{INDEX} names files that are not there: {_some(absent)}")
        files = [file for file in files if file not in absent]
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            tensors |= read_header(folder / file)
        except WeightFileError as error:
            faults.append(str(error))
    if names is not None and not faults:
        lost = [
            name for name, file in names.items() if name not in tensors or tensors[name].file.name != Path(file).name
        ]
        if lost:
            faults.append(f"{INDEX} names tensors that are not in their files: {_some(lost)}")
    return tensors, faults


def _some(names: list[str]) -> str:
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
