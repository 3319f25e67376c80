"""Each response is judged by the rule that declares its data source."""

from __future__ import annotations

from typing import Any

from megatron_rl.config.declarations import REWARDS, reward
from megatron_rl.scoring.built_in import Extra, Score


def rules_of_sources() -> dict[str, str]:
    """Data source -> the name of the rule that declares it."""
    return {source: rule.names[0] for rule in REWARDS.values() for source in rule.traits.data_sources}


@reward("compute_score")
def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Extra = None) -> Score:
    """The score of the rule that declares the data source; raises KeyError for a source that none declares."""
    score: Score = REWARDS[rules_of_sources()[data_source]].function(
        data_source, solution_str, ground_truth, extra_info
    )
    return score
