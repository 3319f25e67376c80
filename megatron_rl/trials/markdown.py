"""Pieces of markdown reports: tables, and blocks of printed lines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headings: Sequence[object], rows: Iterable[Sequence[object]], rule: str = "---") -> list[str]:
    """The lines of a table. rule: of all columns but the first; "---:" aligns numbers to the right."""
    return [_row(headings), "|" + "|".join(["---", *(rule for _ in headings[1:])]) + "|", *map(_row, rows)]


def _row(cells: Sequence[object]) -> str:
    """One line; characters that would end the cell or the line early are escaped."""
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def block(title: str, lines: Sequence[str]) -> list[str]:
    """A title, then the lines unchanged."""
    return [title, "", "```", *lines, "```"]
