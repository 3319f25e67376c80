"""Values and errors of the user's code as plain numbers and texts. No torch."""

from __future__ import annotations

import json
import math
import os
import reprlib
import traceback
from typing import Any

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep

LONGEST_QUOTE = 200
LONGEST_REASON = 2000
LONGEST_TEXT = 100_000
"""Characters; longer texts lose their middle."""
DEEPEST = 100
"""Levels of lists and objects in a value from outside; real ones have about ten. Code that copies or writes a value
calls itself for each level.
"""


def finite_number(value: Any) -> float | None:
    """`value` as a float if it is a finite number of any library, else None; text is no number."""
    if value is None or isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value)
    except Exception:  # libraries raise different errors for values that are no number
        return None
    return number if math.isfinite(number) else None


def plain_text(text: str, longest: int = LONGEST_TEXT) -> str:
    """Return exactly a str that every Unicode encoding can write: lone surrogates as `\\udXXX`, long texts cut in the
    middle.
    """
    exact = str.__str__(text)
    if len(exact) > longest:
        exact = f"{exact[: longest // 2]}...{exact[-(longest // 2) :]}"
    return exact.encode("utf-8", "backslashreplace").decode()


def plain_json(value: Any) -> Any:
    """Return what JSON makes of a value: only dicts with texts as keys, lists, texts, finite numbers, bools and None.

    Raises ValueError, with the rule, for what JSON in UTF-8 cannot hold, and for more than `DEEPEST` levels.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        plain = json.loads(text)
    except UnicodeEncodeError as error:
        code = f"U+{ord(error.object[error.start]):04X}"
        raise ValueError(f"a text has half of a surrogate pair, {code}, which UTF-8 cannot write") from None
    except RecursionError:
        raise ValueError(_DEPTH) from None
    except Exception as error:  # an object of the user's may raise anything
        raise ValueError(f"JSON cannot hold it: {describe_error(error)}") from None
    if is_deeper(plain, DEEPEST):
        raise ValueError(_DEPTH)
    return plain


_DEPTH = f"lists and objects may be nested {DEEPEST} levels deep"


def strict_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, with the rule, for what is none, and as `plain_json`."""
    try:
        return plain_json(json.loads(text))
    except RecursionError:
        raise ValueError(_DEPTH) from None


def is_deeper(value: object, most: int) -> bool:
    """Whether lists and objects of JSON are nested in more than `most` levels."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        children = (child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent))
        level = [child for child in children if isinstance(child, dict | list)]
    return bool(level)


def describe_error(error: BaseException) -> str:
    """Return name and message of an exception; the user's own exception may fail to show its message."""
    try:
        return plain_text(f"{type(error).__name__}: {error}", LONGEST_REASON)
    except BaseException:
        return f"{_type_name(error)}, which cannot be shown as text"


def line_of_user(error: BaseException) -> str:
    """Return " (FILE, line N: SOURCE)" of the last line of the user's file that an exception came from; "" for none.

    The user's file is the first one on the way that is no module of this package.
    """
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(PACKAGE)]
    of_file = [frame for frame in outside if frame.filename == outside[0].filename]
    if not of_file:
        return ""
    frame = of_file[-1]
    source = f": {frame.line}" if frame.line else ""
    return plain_text(f" ({os.path.basename(frame.filename)}, line {frame.lineno}{source})", LONGEST_QUOTE)


def quote(value: object) -> str:
    """Return `repr(value)`, without its middle if it is long; the value's type where `repr` fails."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = LONGEST_QUOTE
    try:
        return plain_text(shortener.repr(value), LONGEST_REASON)
    except BaseException:
        return f"an object of type {_type_name(value)}, which cannot be shown as text"


def _type_name(value: object) -> str:
    """Return the name of the value's class, also where the class has hidden it."""
    return plain_text(type.__dict__["__name__"].__get__(type(value)), LONGEST_QUOTE)
