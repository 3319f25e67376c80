"""Draw the pictures of the docs: python scripts/docs_pictures.py [NAME ...]

Diagrams (scripts/pictures/diagrams.py) are SVG files. All pictures have the colours of megatron_rl/observe/phases.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from pictures import diagrams

FOLDER = Path(__file__).parents[1] / "docs/pictures"
PICTURES: dict[str, Callable[[], Figure]] = {"engine.svg": diagrams.engine}
"""File in docs/pictures -> the function that draws it."""
FIXED = {"svg.fonttype": "none", "svg.hashsalt": "docs"}
"""Text stays text, and names within a file are the same each time."""


def write(name: str, folder: Path) -> Path:
    """Draw one of `PICTURES` into a folder. Returns its file."""
    file = folder / name
    with mpl.rc_context(FIXED):
        PICTURES[name]().savefig(file, metadata={"Date": None} if file.suffix == ".svg" else {"Software": None})
    return file


def main(names: list[str]) -> None:
    """Draw the named pictures, or all."""
    if unknown := [name for name in names if name not in PICTURES]:
        sys.exit(f"no picture {', '.join(unknown)}; there are {', '.join(PICTURES)}")
    for name in names or PICTURES:
        print(write(name, FOLDER))


if __name__ == "__main__":
    main(sys.argv[1:])
