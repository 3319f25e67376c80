"""Balance of experts before anything starts: what is refused, word for word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_folders import EXPERTS, problems, write_model

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.planning.folder_checks import read_model_folder
from megatron_rl.planning.option_rules import option_problems

GROUP = "actor_rollout_ref.actor.megatron.override_transformer_config"
ROUTER = f"{GROUP}.moe_router"


def said(config, **options) -> list[str]:
    for name, value in options.items():
        setattr(config.actor_rollout_ref.actor.megatron.override_transformer_config, name, value)
    return problems(config)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001}, []),
        (
            {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
            [
                f"{ROUTER}_load_balancing_type=aux_loss is not supported: its gradient depends on how a mini-batch is "
                "split into micro-batches; try: seq_aux_loss"
            ],
        ),
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            [f"{ROUTER}_load_balancing_type=sinkhorn must be one of none, seq_aux_loss; did you mean: none"],
        ),
        (
            {"moe_aux_loss_coeff": 0.01},
            [
                f"{GROUP}.moe_aux_loss_coeff=0.01 and {ROUTER}_load_balancing_type=none is of no loss without "
                f"moe_router_load_balancing_type=seq_aux_loss; try: {ROUTER}_load_balancing_type=seq_aux_loss"
            ],
        ),
        ({"moe_z_loss_coeff": -1.0}, [f"{GROUP}.moe_z_loss_coeff=-1 must be >= 0; try: 0"]),
    ],
)
def test_losses(moe_config, options, expected):
    """Would not catch a suggestion that is refused in turn."""
    assert said(moe_config, **options) == expected


def test_biases(moe_config, tmp_path):
    """Of a family without one, unless they stay; at a rate below 0, and of a reference. Would not catch a rate that is
    far too large.
    """
    found = said(moe_config, moe_router_enable_expert_bias=True)
    assert any("the model does not choose experts by scores and a bias" in problem for problem in found)
    assert said(moe_config, moe_router_bias_update_rate=0.0) == []
    found = said(moe_config, moe_router_bias_update_rate=-0.1)
    assert any(f"{ROUTER}_bias_update_rate=-0.1 must be >= 0; try: 0" in problem for problem in found)
    moe_config.actor_rollout_ref.ref.megatron.override_transformer_config.moe_z_loss_coeff = 0.1
    assert any("only the experts of a role that is trained" in problem for problem in problems(moe_config))


def test_a_family_with_a_bias(moe_config, tmp_path):
    """GLM-4.5 has one. Would not catch a bias that the engine does not read."""
    settings = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 32}
    path = write_model(tmp_path / "model", **EXPERTS | settings | {"architectures": ["Glm4MoeForCausalLM"]})
    sizes, found = read_model_folder("model", ModelFolder(path))
    assert found == [] and sizes is not None and sizes.has_expert_bias
    config = json.loads(Path(path, "config.json").read_text())
    assert sizes.parts.shape.attention.turned == 16 and config["head_dim"] == 32
    moe_config.actor_rollout_ref.model.path = path
    options = moe_config.actor_rollout_ref.actor.megatron.override_transformer_config
    options.moe_router_enable_expert_bias = True
    assert list(option_problems(moe_config, [sizes])) == []
