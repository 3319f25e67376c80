"""A request that is not taken: what is wrong with which field, and what would be right. Nothing has changed then."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class BadRequest(Exception):
    """status: HTTP's, 4xx. field: the path of the value in the request. problem: a sentence with the value."""

    def __init__(self, field: str, problem: str, status: int = 400) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.status = field, status


def shown(value: object) -> str:
    """A value for a sentence, cut."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def nearest_sentence(value: object, names: Iterable[str]) -> str:
    """Say that a value is none of the names, and which is nearest."""
    known = list(names)
    nearest = get_close_matches(str(value), known, n=1, cutoff=0.0)
    return f"{shown(value)} is none of {', '.join(known)}; try: {', '.join(nearest) or 'none exists'}"


def one_of(field: str, value: object, names: Iterable[str]) -> str:
    """Return the value. Raises BadRequest, with the nearest name, for one that is none of the names."""
    known = list(names)
    if isinstance(value, str) and value in known:
        return value
    raise BadRequest(field, nearest_sentence(value, known))
