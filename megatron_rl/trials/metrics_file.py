"""Reads a run's metrics.jsonl, while it is being written and afterwards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Step -> metric -> value; empty without a file. A last line that is being written is left out."""
    steps: dict[int, dict[str, float]] = {}
    lines: Sequence[str] = path.read_text().splitlines() if path.is_file() else ()
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                break  # it is being written
            raise
        steps[values["step"]] = {name: value for name, value in values.items() if value is not None}
    return steps
