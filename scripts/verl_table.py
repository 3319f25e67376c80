"""Make the table of docs/start/coming_from_verl.md: which of verl's launch scripts pass `plan` after `port`.

    python scripts/verl_table.py FOLDER [--write docs/start/coming_from_verl.md]

FOLDER holds NAME.args, one argument a line, and the models that they name, relative to it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.planning.checked_config import checked
from megatron_rl.port.port import port

BEGIN, END = "<!-- table by scripts/verl_table.py -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Judged:
    """One script. features: what it asks for and is not here. others: further rules that it breaks, as sentences."""

    name: str
    features: list[str]
    others: list[str]

    @property
    def passes(self) -> bool:
        """Return True where a run could start."""
        return not self.features and not self.others


def judge(file: Path) -> Judged:
    """Port one file of arguments, and check the result as `plan --without-files` does; from the file's folder."""
    ported = port(None, [line for line in file.read_text().splitlines() if line.strip()], os.environ)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "ported.yaml"
        written.write_text(ported.yaml())
        violations = checked(written, [], without_files=True).violations
    others = [str(violation) for violation in violations] if not ported.features else []
    return Judged(file.stem, ported.features, others)


def judged(folder: Path) -> list[Judged]:
    """Every file of a folder, in order."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return [judge(file) for file in sorted(Path().glob("*.args"))]
    finally:
        os.chdir(before)


def table(scripts: Iterable[Judged]) -> str:
    """Return the table in Markdown."""
    rows = list(scripts)
    lines = [f"{sum(row.passes for row in rows)} of {len(rows)} pass.", "", "| script | |", "|---|---|"]
    for row in rows:
        verdict = "passes" if row.passes else "not here: " + ", ".join(row.features) if row.features else row.others[0]
        lines.append(f"| `{row.name}` | {verdict} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or put it into a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", type=Path, help="a page with the two marks between which the table stands")
    given = parser.parse_args()
    text = table(judged(given.folder))
    if given.write is None:
        print(text)
        return
    before, _, rest = given.write.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    given.write.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
