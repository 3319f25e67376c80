"""Reward models and critics: one layout has stages, TP, SP and experts, others none and are dense."""

from __future__ import annotations

from layout_keys import SP
from resumed_rows import save_llama_reward_model
from reward_observations import Scores, Values
from scenarios import ALONE, ALWAYS, Row, Scenario
from tiny_models import save_llama, save_reward_model


def save_mixtral_reward_model(folder, **changes) -> str:
    """A Mixtral with one score."""
    return save_reward_model(folder, "Mixtral", **changes)


# A pass of 24 tokens at most: the longest sequence and one more.
BY_TOKENS = {"reward_model__use_dynamic_bsz": True, "reward_model__forward_max_token_len_per_gpu": 24}
BY_TOKENS |= {"data__max_prompt_length": 12, "data__max_response_length": 12}
REWARDED = (
    Row(Scenario(save_llama_reward_model, "TP2, SP", (2, 2, 1), SP), Scores(), ALWAYS),
    Row(Scenario(save_llama_reward_model, "PP2", (2, 1, 2)), Scores(), ALWAYS),
    Row(Scenario(save_llama_reward_model, "DP2, by tokens", (2, 1, 1), keys=BY_TOKENS), Scores(), ALWAYS),
    Row(Scenario(save_llama_reward_model, "one process", ALONE), Values(), ALWAYS),
    Row(Scenario(save_mixtral_reward_model, "TP2xPP2, SP", (4, 2, 2), SP), Values(), ALWAYS),
    Row(Scenario(save_llama, "one process", ALONE), Values(is_drawn=True), ALWAYS),
)
