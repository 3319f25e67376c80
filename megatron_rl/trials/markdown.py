"""The pieces of which reports are made: tables and what a process printed. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def table(*headings: str, rule: str = "---") -> list[str]:
    """The two lines above a table's rows. rule: of all columns but the first; "---:" sets numbers to the right."""
    return [row(*headings), "|" + "|".join(["---", *(rule for _ in headings[1:])]) + "|"]


def row(*cells: object) -> str:
    """One line of a table; what would end a cell or the line early is escaped."""
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def block(title: str, lines: Sequence[str]) -> list[str]:
    """Lines as they are, below a title."""
    return [title, "", "```", *lines, "```"]
