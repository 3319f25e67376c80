"""The demo's rule reward: the answer is right or it is not."""

from __future__ import annotations


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1.0 if `solution_str` is exactly `ground_truth`, else 0.0."""
    return float(solution_str == ground_truth)
