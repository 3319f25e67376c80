"""Put the tables of published numbers into docs/planner.md: python scripts/planner_table.py [--check]."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from published.table import markdown_table
from published.unseen import markdown_tables

DOCUMENT = Path(__file__).parents[1] / "docs" / "planner.md"
TABLES: dict[str, Callable[[], str]] = {"published points": markdown_table, "unseen rows": markdown_tables}


def with_tables(text: str) -> str:
    """The document with each table between its two marks."""
    for title, table in TABLES.items():
        begin, end = (f"<!-- {edge} of {title}, by scripts/planner_table.py -->" for edge in ("begin", "end"))
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{table()}\n{end}{after}"
    return text


def main() -> None:
    """Write the document, or with --check only say whether it is up to date."""
    text = DOCUMENT.read_text()
    made = with_tables(text)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if text == made else f"{DOCUMENT} is out of date: run python scripts/planner_table.py")
    DOCUMENT.write_text(made)


if __name__ == "__main__":
    main()
