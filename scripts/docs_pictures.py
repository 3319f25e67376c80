"""Draw the pictures of the docs, all in the colours of megatron_rl/observe/picture_style.py.

    python scripts/docs_pictures.py [NAME ...]              draw all, or these of docs/pictures
    python scripts/docs_pictures.py --record NAME RUN ...   record runs, in docs/pictures/data

Diagrams (scripts/pictures/*diagrams.py) are SVG files. Charts (scripts/pictures/charts.py) are drawn from the records
(scripts/pictures/records.py), from docs/demo_run.json, and from the ablation's table in docs/internals/measured.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from pictures import charts, diagrams, records, run_diagrams

FOLDER = Path(__file__).parents[1] / "docs/pictures"
PICTURES: dict[str, Callable[[], Figure]] = {
    "engine.svg": diagrams.engine,
    "processes.svg": run_diagrams.processes,
    "episode.svg": run_diagrams.episode,
    "demo_curves.png": charts.demo_curves,
    "real_curves.png": charts.real_curves,
    "recipe_curves.png": charts.recipes,
    "rlhf_stages.png": charts.stages,
    "distillation.png": charts.distillation,
    "timeline.png": partial(charts.timeline, "timeline"),
    "async_timeline.png": partial(charts.timeline, "async_timeline"),
    "map.png": charts.layouts,
    "ablation.png": charts.ablation,
}
"""File in docs/pictures -> the function that draws it."""
FIXED = {"svg.fonttype": "none", "svg.hashsalt": "docs"}
"""Text stays text, and names within a file are the same each time."""


def write(name: str, folder: Path) -> Path:
    """Draw one of `PICTURES` into a folder. Returns its file."""
    file = folder / name
    with mpl.rc_context(FIXED):
        PICTURES[name]().savefig(file, metadata={"Date": None} if file.suffix == ".svg" else {"Software": None})
    return file


def main() -> None:
    """Record runs if they are given, then draw the named pictures, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}; with --record: folders of runs")
    parser.add_argument("--record", choices=list(records.RECORDS))
    given = parser.parse_args()
    if given.record:
        print(records.write(given.record, [Path(folder) for folder in given.names]))
        return
    if unknown := [name for name in given.names if name not in PICTURES]:
        sys.exit(f"no picture {', '.join(unknown)}; there are {', '.join(PICTURES)}")
    for name in given.names or PICTURES:
        print(write(name, FOLDER))


if __name__ == "__main__":
    main()
