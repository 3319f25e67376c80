"""Rollouts in 8 bits: what is refused before anything starts, word for word, and what the plan says of their bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from model_folders import EXPERTS, problems, set_experts, write_model

from megatron_rl.config.load import load_config
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.transition import TransitionPlan

REPOSITORY = Path(__file__).parents[2]
ROLLOUT, CORRECTION = "actor_rollout_ref.rollout", "algorithm.rollout_correction"
QUANTIZATION, BLOCK = f"{ROLLOUT}.quantization", f"{ROLLOUT}.quantization_block_size"


@pytest.fixture
def eight_bits(config):
    """Shards of 6 and 3 heads of 32, and of 96 columns of the MLP."""
    config.actor_rollout_ref.rollout.quantization = "fp8"
    config.actor_rollout_ref.rollout.quantization_block_size = 32
    config.algorithm.rollout_correction.rollout_is = "token"
    return config


def test_a_fitting_block_with_importance_weights_passes(eight_bits):
    """Also sequence weights, and the rollout's log-probs as old ones. Would not catch what vLLM refuses."""
    assert problems(eight_bits) == []
    eight_bits.algorithm.rollout_correction.rollout_is = "sequence"
    assert problems(eight_bits) == []
    eight_bits.algorithm.rollout_correction = replace(
        eight_bits.algorithm.rollout_correction, rollout_is=None, bypass_mode=True
    )
    assert problems(eight_bits) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda c: setattr(c.actor_rollout_ref.rollout, "quantization_block_size", 128),
            f"{BLOCK}=128 must divide the pieces of every quantized weight: the columns of "
            "model.layers.0.self_attn.o_proj.weight at training's tp(2) are 384 x 192 on a rank; try: 96",
        ),
        (
            lambda c: setattr(c.actor_rollout_ref.rollout, "quantization_block_size", 8),
            f"{BLOCK}=8 must be >= 16; try: 16",
        ),
        (
            lambda c: setattr(c.actor_rollout_ref.rollout, "quantization", "int4"),
            f"{QUANTIZATION}=int4 must be one of fp8; did you mean: fp8",
        ),
        (
            lambda c: setattr(c.actor_rollout_ref.rollout, "tensor_model_parallel_size", 6),
            f"{BLOCK}=48 must divide",
        ),
    ],
)
def test_what_does_not_fit_is_refused(eight_bits, change, expected):
    """Values, rule, and the nearest valid choice. Would not catch two faults that hide each other."""
    change(eight_bits)
    if "=48" in expected:
        eight_bits.actor_rollout_ref.rollout.quantization_block_size = 48
    found = problems(eight_bits)
    assert any(problem.startswith(expected) for problem in found), found


def test_nothing_nearer_than_whole_weights(eight_bits, tmp_path):
    """MLP columns of 20 on a rank have no block of 16. Would not catch a block between 16 and 20 that fits."""
    write_model(tmp_path / "model", intermediate_size=40)
    (found,) = problems(eight_bits)
    assert found.startswith(f"{BLOCK}=32 must divide") and found.endswith(f"try: {QUANTIZATION}=null")


def test_experts_are_made_of_whole_blocks(moe_config, tmp_path):
    """Columns of experts on a rank of ETP, and of generation. Would not catch a cut of experts among ranks."""
    rollout = moe_config.actor_rollout_ref.rollout
    rollout.quantization, rollout.quantization_block_size = "fp8", 16
    moe_config.algorithm.rollout_correction.rollout_is = "token"
    (found,) = problems(moe_config)
    assert found == (
        f"{BLOCK}=16 must divide the pieces of every quantized weight: the gate of "
        "model.layers.0.mlp.experts.routed_experts.w13_weight at training's tp(2) are 10 x 384 on a rank; try: "
        f"{QUANTIZATION}=null"
    )
    write_model(tmp_path / "model", **EXPERTS | {"moe_intermediate_size": 32})
    assert problems(moe_config) == []
    write_model(tmp_path / "model", **EXPERTS | {"moe_intermediate_size": 48})
    set_experts(moe_config, expert_tensor_parallel_size=1)
    (found,) = problems(moe_config)
    assert "w13_weight at generation's tp(2) are 24 x 384" in found
    rollout.tensor_model_parallel_size = 1
    assert problems(moe_config) == []


def test_bounds_on_log_probs_are_those_of_8_bits():
    """Unless they are set. Would not catch bounds that let a stale weight pass."""
    demo = REPOSITORY / "configs/demo_cpu.yaml"
    rollout = load_config(demo, [f"{QUANTIZATION}=fp8"]).actor_rollout_ref.rollout
    assert (rollout.logprob_diff_bound, rollout.logprob_diff_mean_bound) == (1.0, 0.1)
    rollout = load_config(demo, [f"{QUANTIZATION}=fp8", f"{ROLLOUT}.logprob_diff_bound=2"]).actor_rollout_ref.rollout
    assert (rollout.logprob_diff_bound, rollout.logprob_diff_mean_bound) == (2.0, 0.1)


def test_half_the_bytes_of_an_8b_model_cross():
    """In bfloat16, blocks of 128: 1 + 4 / 16384 bytes for 2. Would not catch linears that no layer counts."""
    recipe, model = REPOSITORY / "configs/recipes/llama3_8b_grpo.yaml", REPOSITORY / "configs/models/llama-3-8b"
    layout = [f"actor_rollout_ref.model.path={model}", "trainer.nnodes=1", "trainer.n_gpus_per_node=8"]
    layout += ["actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4"]
    layout += [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
        f"{ROLLOUT}.tensor_model_parallel_size=4",
    ]
    as_trained, eight = (
        RunModels(load_config(recipe, [*layout, f"{QUANTIZATION}={kind}"])) for kind in ("null", "fp8")
    )
    plans = [TransitionPlan.of(models) for models in (as_trained, eight)]
    received = [[sum(each) for each in zip(plan.network, plan.link, strict=True)] for plan in plans]
    # A rank lacks 16 layers, of which it needs a quarter of each matrix; norms, head and embedding stay as trained.
    linears = 16 * ((32 + 2 * 8) * 128 * 4096 + 32 * 128 * 4096 + 3 * 14336 * 4096) // 4
    assert received[0][0] - received[1][0] == linears * 2 - linears - linears * 4 // 128**2
    assert (linears + linears * 4 // 128**2) / (2 * linears) == pytest.approx(0.5001, abs=3e-5)
    own = eight.served_bytes(0)["own codes"]
    assert own == pytest.approx(linears * (1 + 4 / 128**2), rel=1e-4)
