"""Values and errors of the user's code as plain numbers and texts. No torch."""

from __future__ import annotations

import math
import reprlib
from typing import Any

LONGEST_QUOTE = 200
LONGEST_REASON = 2000
LONGEST_TEXT = 100_000
"""Characters; longer texts lose their middle."""


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


def describe_error(error: BaseException) -> str:
    """Return name and message of an exception; the user's own exception may fail to show its message."""
    try:
        return plain_text(f"{type(error).__name__}: {error}", LONGEST_REASON)
    except BaseException:
        return f"{_type_name(error)}, which cannot be shown as text"


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
