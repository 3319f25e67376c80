"""Tables on the console and in markdown, and the files of a run that are read after it: summary, tables of samples."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import JustifyMethod
from rich.table import Table

from megatron_rl.observe.appended_file import replace_file
from megatron_rl.observe.terminal import terminal_text

PLAN_FILE = "plan.json"
"""What was planned for a run, in its folder."""


def layout_table(rows: Iterable[tuple[str, object, str]], title: str = "Layout and batch") -> Table:
    """(name, value, note) per row."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("what")
    table.add_column("value", justify="right", style="cyan")
    table.add_column("how it comes about", style="dim")
    for name, value, note in rows:
        table.add_row(name, str(value), note)
    return table


def plain_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of texts: the first column names the row, and numbers are aligned to the right."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for number, heading in enumerate(headings):
        justify: JustifyMethod = "left" if number == 0 or heading == "ranks" else "right"
        table.add_column(heading, justify=justify, overflow="fold")  # a long path is shown whole
    for row in rows:
        table.add_row(*map(terminal_text, row))
    return table


def before_after_table(rows: Iterable[tuple[str, float, float]]) -> Table:
    """(name, before, after) per row, with the change."""
    texts = ((name, f"{old:.3f}", f"[bold]{new:.3f}", f"{new - old:+.3f}") for name, old, new in rows)
    return plain_table("Before and after", ("metric", "before", "after", "change"), texts)


def markdown_table(headings: Sequence[object], rows: Iterable[Sequence[object]], rule: str = "---") -> list[str]:
    """Return the lines of a table. rule: of all columns but the first; "---:" aligns numbers to the right."""

    def line(cells: Sequence[object]) -> str:
        # Characters that would end the cell or the line early are escaped.
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(headings), "|" + "|".join(["---", *(rule for _ in headings[1:])]) + "|", *map(line, rows)]


def markdown_block(title: str, lines: Sequence[str]) -> list[str]:
    """Return a title, then the lines unchanged."""
    return [title, "", "```", *lines, "```"]


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write `summary` as indented JSON with sorted keys; floats that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(finite_or_null(summary), indent=2, sort_keys=True, allow_nan=False)
    replace_file(path, text.encode() + b"\n")


def write_sample_table(folder: Path, step: int, rows: Iterable[dict[str, Any]]) -> Path:
    """Write one row per response to `folder/STEP.jsonl`, as verl names it, in place of an earlier table of that step.

    What JSON does not have is written as text; floats that are not finite become null. Returns the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{step}.jsonl"
    texts = (json.dumps(finite_or_null(row), ensure_ascii=False, allow_nan=False, default=str) for row in rows)
    replace_file(file, "".join(text + "\n" for text in texts).encode())
    return file


def finite_or_null(value: Any) -> Any:
    """Copy nested dicts and lists with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
