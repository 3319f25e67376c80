"""Print what a model answered before and after training: python scripts/show_answers.py VALIDATION_DATA_DIR [--rows N]

The folder is a run's `trainer.validation_data_dir`: one table of samples for each validation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table


def read(table: Path) -> list[dict]:
    """The samples of one validation."""
    return [json.loads(line) for line in table.read_text().splitlines()]


def accuracy(rows: list[dict]) -> float:
    """Mean of "acc", or of the score where the reward function names no accuracy."""
    return sum(row.get("acc", row["score"]) for row in rows) / len(rows)


def question(row: dict) -> str:
    """The prompt's last line but one: the last is where the chat template has the model begin."""
    lines = [line for line in row["input"].splitlines() if line.strip()]
    return lines[-2] if len(lines) > 1 else row["input"]


def answers(before: list[dict], after: list[dict], num_rows: int) -> Table:
    """The first prompts side by side, and the accuracy over all of them."""
    table = Table("prompt", "before", "after", "right", title=f"the first {num_rows} of {len(after)} held-out prompts")
    for old, new in list(zip(before, after, strict=True))[:num_rows]:
        table.add_row(question(new), repr(old["output"]), repr(new["output"]), str(new["gts"]))
    table.add_section()
    table.add_row("accuracy", f"{accuracy(before):.3f}", f"{accuracy(after):.3f}")
    return table


def main() -> None:
    """Print the table of the first and the last validation. Exits with 2 where there are not two of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=12)
    args = parser.parse_args()
    steps = sorted(args.folder.glob("*.jsonl"), key=lambda file: int(file.stem))
    if len(steps) < 2:
        parser.error(f"{args.folder} has {len(steps)} tables of validation samples; a comparison needs two")
    Console().print(answers(read(steps[0]), read(steps[-1]), args.rows))


if __name__ == "__main__":
    main()
