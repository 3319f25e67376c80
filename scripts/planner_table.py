"""Put the table of published points, as it is now, into docs/planner.md: python scripts/planner_table.py [--check]."""

from __future__ import annotations

import sys
from pathlib import Path

from published.table import markdown_table

DOCUMENT = Path(__file__).parents[1] / "docs" / "planner.md"
BEGIN, END = "<!-- begin of scripts/planner_table.py -->", "<!-- end of scripts/planner_table.py -->"


def with_table(text: str) -> str:
    """The document with the table between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown_table()}\n{END}{after}"


def main() -> None:
    """Write the document, or with --check only say whether it is up to date."""
    text = DOCUMENT.read_text()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if text == with_table(text) else f"{DOCUMENT} is out of date: run python scripts/planner_table.py")
    DOCUMENT.write_text(with_table(text))
    print(markdown_table())


if __name__ == "__main__":
    main()
