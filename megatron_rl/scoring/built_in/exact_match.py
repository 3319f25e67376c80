"""The response must be the ground truth itself."""

from __future__ import annotations

from typing import Any

from megatron_rl.config.declarations import reward
from megatron_rl.scoring.built_in import Extra, Score, score_of


@reward("exact_match", data_sources=("demo/addition",))
def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Extra = None) -> Score:
    """Right if the response is the ground truth, letter for letter; blanks at both ends do not count."""
    answer = solution_str.strip()
    return score_of(answer == str(ground_truth).strip(), answer)
