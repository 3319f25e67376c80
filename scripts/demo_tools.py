"""The tool of an agent demo, and the reward of its answers."""

from __future__ import annotations

import re

from megatron_rl.agents.tools import tool


@tool
def add(terms: str) -> str:
    """Add numbers.

    Args:
        terms: numbers with + between them
    """
    return f"{sum(map(int, terms.split('+'))):05d}"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1.0 if the last five digits, behind a call and its result or alone, are the ground truth."""
    answer = re.fullmatch(r"(?:\[.*\]\d{5})?(\d{5})", solution_str)
    return float(answer is not None and answer[1] == ground_truth)
