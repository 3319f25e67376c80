"""Tables before and after a run, and its summary as a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table


def layout_table(rows: Iterable[tuple[str, object, str]], title: str = "Layout and batch") -> Table:
    """Two columns with a note: (name, value, note) per row. Print it with a rich console."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("what")
    table.add_column("value", justify="right", style="cyan")
    table.add_column("how it comes about", style="dim")
    for name, value, note in rows:
        table.add_row(name, str(value), note)
    return table


def plain_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """One row of text each; the first column names the row, and numbers stand to the right of it."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 or heading == "ranks" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def before_after_table(rows: Iterable[tuple[str, float, float]], title: str = "Before and after") -> Table:
    """(name, before, after) per row, with the change. Print it with a rich console."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("metric")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for name, before, after in rows:
        table.add_row(name, f"{before:.3f}", f"[bold]{after:.3f}", f"{after - before:+.3f}")
    return table


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write `summary` as indented JSON with sorted keys; floats that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(finite_or_null(summary), indent=2, sort_keys=True, allow_nan=False) + "\n")


def finite_or_null(value: Any) -> Any:
    """A copy of nested dicts and lists in which None stands for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
