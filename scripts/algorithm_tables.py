"""Put the tables of estimators and policy losses into docs/algorithms.md: python scripts/algorithm_tables.py [--check].

A row is what the function declares: its names, the first paragraph of its docstring, the papers it cites, its keys.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.declarations import ESTIMATORS, POLICY_LOSSES, Declaration

DOCUMENT = Path(__file__).parents[1] / "docs" / "algorithms.md"
TABLES: dict[str, tuple[str, Mapping[str, Declaration[Any]]]] = {
    "estimators": ("| `algorithm.adv_estimator` | advantage of each token | source | keys |", ESTIMATORS),
    "policy losses": ("| `policy_loss.loss_mode` | loss of a token | source | keys |", POLICY_LOSSES),
}


def markdown_table(head: str, declarations: Mapping[str, Declaration[Any]]) -> str:
    """A row for each declared function, with its aliases."""
    rows = [head, "|---|---|---|---|"]
    for name, declared in declarations.items():
        if name == declared.names[0]:
            papers = ", ".join(f"[{paper}](https://arxiv.org/abs/{paper})" for paper in declared.papers)
            names, keys = (", ".join(f"`{text}`" for text in texts) for texts in (declared.names, declared.keys))
            formula = declared.formula.rstrip(".").replace("|", "\\|")
            rows.append(f"| {names} | {formula} | {papers} | {keys} |")
    return "\n".join(rows)


def with_tables(text: str) -> str:
    """The document with each table between its two marks."""
    for title, table in TABLES.items():
        begin, end = (f"<!-- {edge} of {title}, by scripts/algorithm_tables.py -->" for edge in ("begin", "end"))
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{markdown_table(*table)}\n{end}{after}"
    return text


def main() -> None:
    """Write the document, or with --check exit with a message when it is not current."""
    text = DOCUMENT.read_text()
    if "--check" not in sys.argv[1:]:
        DOCUMENT.write_text(with_tables(text))
    elif text != with_tables(text):
        sys.exit(f"{DOCUMENT} is not current: run python scripts/algorithm_tables.py")


if __name__ == "__main__":
    main()
