"""Folders of MiniMax-M2: how much of a head turns must be the same for transformers and for vLLM."""

from __future__ import annotations

import pytest
from model_folders import problems, write_model

from megatron_rl.model.families import FAMILIES, rollout_settings

MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "use_sliding_window": None,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "num_mtp_modules": 3,
}
HALF = {"rope_theta": 5e6, "rope_type": "default", "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("changes", "turned"),
    [
        ({"rotary_dim": 16, "rope_parameters": HALF}, 16),
        ({"rope_parameters": HALF}, 16),
        ({"rotary_dim": 32}, 32),
        ({}, 32),
    ],
)
def test_elements_that_turn(moe_config, tmp_path, changes, turned) -> None:
    """vLLM gets the number that transformers reads. Would not catch a third key."""
    write_model(tmp_path / "model", **MINIMAX | changes)
    assert problems(moe_config) == []
    settings = MINIMAX | changes | {"num_hidden_layers": 6}
    overrides = rollout_settings(FAMILIES["MiniMaxM2ForCausalLM"], settings)
    assert overrides["rotary_dim"] == turned
    assert (overrides["scoring_func"], overrides["use_routing_bias"]) == ("sigmoid", True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"rotary_dim": 16},
            "must be head_dim(32) * partial_rotary_factor(1.0) = 32: vLLM rotates the number of elements of a "
            "head that rotary_dim gives, and transformers reads partial_rotary_factor of rope_parameters alone; try: "
            "rope_parameters.partial_rotary_factor=0.5",
        ),
        ({"rotary_dim": 32, "rope_parameters": HALF}, "rotary_dim=32 of "),
        ({"scoring_func": "softmax"}, 'scoring_func="softmax" of '),
        ({"use_routing_bias": False}, "use_routing_bias=false of "),
        ({"qk_norm_type": "per_head"}, 'qk_norm_type="per_head" of '),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size=64 of "),
        ({"attention_bias": True}, "attention_bias=true of "),
    ],
)
def test_what_the_two_read_otherwise_is_refused(moe_config, tmp_path, changes, expected) -> None:
    """Would not catch a setting of which neither knows."""
    write_model(tmp_path / "model", **MINIMAX | changes)
    (problem,) = problems(moe_config)
    assert expected in problem
