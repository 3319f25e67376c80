"""The demo's numbers, all from one recorded run: docs/demo_run.json, and what pages and the picture make of it.

    python scripts/demo_record.py            put the record into pages, and draw docs/pictures/demo_curves.png
    python scripts/demo_record.py --check    exit with a message if a page is not current
    python scripts/demo_record.py --run outputs/demo --cost run_seconds=74 ...
                                             record a run first, and what the commands cost (`COSTS`)

A page shows the numbers between two marks (scripts/marked_tables.py), "the demo" or "demo in a sentence".
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from marked_tables import with_tables

REPOSITORY = Path(__file__).parents[1]
RECORD = REPOSITORY / "docs/demo_run.json"
PICTURE = "demo_curves.png"
PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md")))
ACCURACY = "val-core/demo/addition/acc/mean@1"
CONFIG = "demo_cpu.yaml"
COSTS = ("install_seconds", "install_cpu_seconds", "run_seconds", "run_cpu_seconds")
SIGNIFICANT = 6
"""Digits of the recorded metrics."""


def panel_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics of a step that its picture shows, and the step's number and seconds."""
    from megatron_rl.observe.picture_style import LINE_PANELS, STACKED

    lines = {name for _, names, _ in LINE_PANELS for name in names}
    shown = {"step", ACCURACY, "timing_s/step", "timing_s/testing"} | lines | {f"timing_s/{name}" for name in STACKED}
    kept = {name: float(f"{value:.{SIGNIFICANT}g}") for name, value in metrics.items() if name in shown}
    return kept | {"step": int(metrics["step"])}


def record(folder: Path, costs: dict[str, float]) -> dict[str, Any]:
    """Return the record of a run's folder. costs: its entries of `COSTS`."""
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "command": "make demo",
        "seed": summary["seed"],
        "cores": 2,
        **costs,
        "metrics": [panel_metrics(line) for line in lines],
    }


def write_record(content: dict[str, Any]) -> None:
    """Write the record with one line for each step."""
    steps = ",\n".join(f"  {json.dumps(step)}" for step in content.pop("metrics"))
    head = json.dumps(content, indent=1).removesuffix("\n}")
    RECORD.write_text(f'{head},\n "metrics": [\n{steps}\n ]\n}}\n')


def accuracies(content: dict[str, Any]) -> dict[int, float]:
    """Step -> held-out accuracy, of the steps that were validated; 0 is before training."""
    return {int(step["step"]): step[ACCURACY] for step in content["metrics"] if ACCURACY in step}


def blocks(content: dict[str, Any]) -> dict[str, str]:
    """Return title -> text of what pages show between marks."""
    measured = accuracies(content)
    last = max(measured)
    change = f"{measured[0]:.3f} to {measured[last]:.3f}"
    installing, installing_cpu, seconds, cpu = (content[name] for name in COSTS)
    return {
        "demo in a sentence": f"Held-out accuracy goes from {change} in {last} steps.",
        "the demo": "\n".join(
            (
                f"| `{content['command']}`, seed {content['seed']}, {content['cores']} CPU cores | |",
                "|---|---|",
                *(
                    f"| held-out accuracy {f'after step {step}' if step else 'before training'} | {accuracy:.3f} |"
                    for step, accuracy in measured.items()
                ),
                f"| installation, once | {installing:.0f} s, {installing_cpu:.0f} CPU seconds |",
                f"| run, start to exported model | {seconds:.0f} s, {cpu:.0f} CPU seconds |",
            )
        ),
    }


def table_row(content: dict[str, Any], row: str) -> str:
    """Return a row of a table of recipes (recipe, algorithm, layout, accuracies, minutes) with the record's numbers."""
    cells = row.split("|")
    measured = [f" {accuracy:.3f} " for accuracy in accuracies(content).values()]
    minutes = content["run_seconds"] / 60
    return "|".join([*cells[:4], *measured, f" {minutes:.1f} ", ""])


def current(text: str, content: dict[str, Any]) -> str:
    """Return a page's text with the record's numbers in its marks, and in the rows of tables that name the recipe."""
    shown = {title: block for title, block in blocks(content).items() if f"<!-- begin of {title}," in text}
    text = with_tables(text, shown, Path(__file__).name)
    lines = text.split("\n")
    return "\n".join(table_row(content, line) if line.startswith(f"| `{CONFIG}` |") else line for line in lines)


def main() -> None:
    """Record a run if one is given, then write the pages and the picture, or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is not current")
    parser.add_argument("--run", type=Path, help="folder of the run to record")
    parser.add_argument("--cost", action="append", default=[], help="one of COSTS=SECONDS; others stay")
    given = parser.parse_args()
    if given.run is not None:
        before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        now = {name: float(value) for name, value in (cost.split("=") for cost in given.cost)}
        write_record(record(given.run, {name: (before | now)[name] for name in COSTS}))
    content = json.loads(RECORD.read_text())
    for page in PAGES:
        text = page.read_text()
        made = current(text, content)
        if given.check and made != text:
            sys.exit(f"{page} is not current: run python scripts/demo_record.py")
        if made != text:
            page.write_text(made)
    if not given.check:
        from docs_pictures import FOLDER, write

        write(PICTURE, FOLDER)


if __name__ == "__main__":
    main()
