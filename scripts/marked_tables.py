"""Tables that scripts make and put into documents, each between two marks with its title and its script's name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def with_tables(text: str, tables: Mapping[str, str], script: str) -> str:
    """Return a document with its tables. tables: title -> lines of the table."""
    for title, table in tables.items():
        begin, end = (f"<!-- {edge} of {title}, by scripts/{script} -->" for edge in ("begin", "end"))
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


def write_or_check(document: Path, tables: Mapping[str, str], script: str) -> None:
    """Write the tables, or with --check exit with a message if the document is not current."""
    text = document.read_text()
    made = with_tables(text, tables, script)
    if "--check" not in sys.argv[1:]:
        document.write_text(made)
    elif text != made:
        sys.exit(f"{document} is not current: run python scripts/{script}")
