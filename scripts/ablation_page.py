"""Put an ablation's table and picture into docs/: python scripts/ablation_page.py [FOLDER]."""

from __future__ import annotations

import sys
from pathlib import Path

import docs_pictures

DOCS = Path(__file__).parents[1] / "docs"
DOCUMENT, PICTURE = DOCS / "internals/measured.md", "ablation.png"
BEGIN, END = "<!-- begin of scripts/ablation_page.py -->", "<!-- end of scripts/ablation_page.py -->"


def with_report(text: str, report: str) -> str:
    """The document with the report between its two marks: without its title, its headings one level lower."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    _, _, body = report.partition("\n")
    lines = [f"#{line}" if line.startswith("## ") else line for line in body.strip().splitlines()]
    return "\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"])


def main() -> None:
    """Write the document, and draw the picture of its table."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/ablation")
    DOCUMENT.write_text(with_report(DOCUMENT.read_text(), (folder / "ablation.md").read_text()))
    docs_pictures.write(PICTURE, docs_pictures.FOLDER)


if __name__ == "__main__":
    main()
