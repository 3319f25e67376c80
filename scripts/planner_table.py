"""Put the tables of published numbers into docs/internals/planner_calibration.md: planner_table.py [--check]."""

from __future__ import annotations

from pathlib import Path

from marked_tables import write_or_check
from published.table import markdown_table
from published.unseen import markdown_tables

DOCUMENT = Path(__file__).parents[1] / "docs/internals/planner_calibration.md"


if __name__ == "__main__":
    write_or_check(
        DOCUMENT, {"published points": markdown_table(), "unseen rows": markdown_tables()}, Path(__file__).name
    )
