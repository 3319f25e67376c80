"""What vLLM is asked of drafts, by hand."""

from __future__ import annotations

import pytest

from megatron_rl.config.rollout_keys import RolloutConfig
from megatron_rl.rollout.arguments import PROPOSER, draft_arguments
from megatron_rl.rollout.earlier_proposer import EarlierProposer


@pytest.mark.parametrize(
    ("most", "schedule"),
    [(None, [(1, 8, 3)]), (5, [(1, 5, 3), (6, 8, 0)]), (8, [(1, 8, 3)]), (100, [(1, 8, 3)])],
)
def test_drafts_end_by_the_number_of_requests(most, schedule):
    """Eight requests run together. Would not catch a schedule that vLLM reads otherwise: `test_drafts.py` does."""
    config = RolloutConfig(speculative="ngram", max_num_seqs=8, speculative_disable_by_batch_size=most)
    asked = draft_arguments(config)["speculative_config"]
    assert asked["num_speculative_tokens_per_batch_size"] == schedule
    assert (asked["method"], asked["prompt_lookup_min"], asked["prompt_lookup_max"]) == ("ngram", 2, 4)
    assert draft_arguments(RolloutConfig()) == {}


def test_earlier_answers_are_searched_by_a_class_of_ours():
    """It exists under the name that vLLM is given. Would not catch a class that vLLM refuses: `test_drafts.py` does."""
    asked = draft_arguments(RolloutConfig(speculative="earlier", max_num_seqs=8))["speculative_config"]
    assert asked.pop("num_speculative_tokens_per_batch_size") == [(1, 8, 3)]
    assert asked == {"num_speculative_tokens": 3, "method": "custom_class", "model": PROPOSER}
    assert f"{EarlierProposer.__module__}.{EarlierProposer.__qualname__}" == PROPOSER
