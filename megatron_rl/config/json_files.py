"""Read JSON files that others wrote: whatever such a file holds, the reader gets plain values or one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl.config.file_kinds import instead_of_file
from megatron_rl.plain_values import DEEPEST, is_deeper

LARGEST_JSON = 256 << 20
"""Bytes of a JSON file that is read whole; tokenizers have up to about 35 MB."""
MOST_DIGITS = 300
"""Digits of a whole number: larger ones are no floating-point number."""


class UnreadableFileError(Exception):
    """A file that cannot be read; the message is the reason, beginning with the file's name."""


def read_json(file: Path, largest: int = LARGEST_JSON) -> Any:
    """Return the content of a JSON file.

    The content is at most DEEPEST levels deep, each of its whole numbers fits a float, and each of its texts can be
    written. NaN and infinity are read as Python reads them. largest: bytes.

    Raises UnreadableFileError for any other file, and for what is no file.
    """
    lacks = instead_of_file(file)
    if lacks is not None:
        raise UnreadableFileError(f"{file.name} must be a file, and {lacks}")
    try:
        size = file.stat().st_size
        if size > largest:
            raise UnreadableFileError(f"{file.name} has {size} bytes, and at most {largest} are read")
        return parsed_json(file.read_bytes())
    except ValueError as error:
        raise UnreadableFileError(f"{file.name} is not valid JSON: {error}") from error
    except OSError as error:
        raise UnreadableFileError(f"{file.name} cannot be read: {error.strerror}") from error


def read_json_object(file: Path, largest: int = LARGEST_JSON) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UnreadableFileError as `read_json`, and for anything but an object."""
    content = read_json(file, largest)
    if not isinstance(content, dict):
        raise UnreadableFileError(f"{file.name} is not an object in braces")
    return content


def parsed_json(text: str | bytes) -> Any:
    """Return the value of a JSON text in UTF-8, with the bounds of `read_json`. Raises ValueError for any other.

    What agents and tools send is read by `plain_values.strict_json`, which takes no NaN.
    """
    written = text if isinstance(text, str) else text.decode()  # of bytes json.loads would take other encodings, too
    try:
        content = json.loads(written, parse_int=_bounded)
    except RecursionError:
        raise ValueError(f"it is more than {DEEPEST} levels deep") from None
    if is_deeper(content, DEEPEST):
        raise ValueError(f"it is more than {DEEPEST} levels deep")
    if "\\ud" in written.lower():
        json.dumps(content, ensure_ascii=False).encode()  # UnicodeEncodeError, a ValueError, for half a pair
    return content


def _bounded(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, and at most {MOST_DIGITS} are read")
    return int(digits)
