"""Put the tables of estimators and losses into docs/train/algorithms.md: python scripts/algorithm_tables.py [--check].

A row is what the function declares: its names, the first paragraph of its docstring, the papers it cites, its keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marked_tables import write_or_check

from megatron_rl.config.declarations import (
    DISTILLATION_LOSSES,
    ESTIMATORS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    Declaration,
)

DOCUMENT = Path(__file__).parents[1] / "docs/train/algorithms.md"
TABLES: dict[str, tuple[str, Mapping[str, Declaration[Any]]]] = {
    "estimators": ("| `algorithm.adv_estimator` | advantage of each token | source | keys |", ESTIMATORS),
    "policy losses": ("| `policy_loss.loss_mode` | loss of a token | source | keys |", POLICY_LOSSES),
    "distillation losses": ("| `loss_mode` | loss of a token | source | keys |", DISTILLATION_LOSSES),
    "preference losses": ("| `dpo.loss` | loss of a pair | source | keys |", PREFERENCE_LOSSES),
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


if __name__ == "__main__":
    made = {title: markdown_table(*table) for title, table in TABLES.items()}
    write_or_check(DOCUMENT, made, Path(__file__).name)
