"""Folders of gpt-oss: what plan accepts, what it says of 4 bits, and what it refuses by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_folders import problems, write_model, write_tensors

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.planning.folder_checks import read_model_folder

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
SINKS = {
    "architectures": ["GptOssForCausalLM"],
    "rope_parameters": None,
    "rope_scaling": YARN,
    "rope_theta": 150000,
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "use_sliding_window": None,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
FOUR_BITS = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
STACK = "model.layers.0.mlp.experts.gate_up_proj"
CODES = {f"{STACK}_blocks": "U8", f"{STACK}_scales": "U8"}


@pytest.fixture
def sinks_config(moe_config, tmp_path):
    write_model(tmp_path / "model", **SINKS)
    return moe_config


def test_a_published_config_is_accepted(sinks_config, tmp_path) -> None:
    """With a window that is shorter than any row. Would not catch keys that a later release has."""
    assert problems(sinks_config) == []
    write_model(tmp_path / "model", **SINKS | FOUR_BITS)
    assert problems(sinks_config) == []


@pytest.mark.parametrize(
    ("name", "given", "offered"),
    [
        ("target_modules", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], ["linear_qkv", "linear_proj"]),
        ("target_modules", ["gate_up_proj"], ["all-linear"]),
        ("exclude_modules", ["*.experts.*"], []),
    ],
)
def test_adapters_of_stacked_experts_are_refused_by_name(name, given, offered, sinks_config, tmp_path) -> None:
    """The default among them; what is offered is accepted. Would not catch stacks that are not transposed."""
    lora = sinks_config.actor_rollout_ref.model.lora
    lora.rank = 8
    if name == "exclude_modules":
        lora.target_modules = ["all-linear"]
    setattr(lora, name, given)
    (found,) = problems(sinks_config)
    assert "names stacked experts of " in found and "which have no adapters; " in found
    assert found.endswith(f"try: {offered}")
    setattr(lora, name, offered)
    assert problems(sinks_config) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_scaling": None}, "rope_type='default' is not supported; known: yarn"),
        ({"rope_scaling": YARN | {"attention_factor": 1.0}}, "yarn with attention_factor is not supported"),
        ({"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, "yarn with mscale, mscale_all_dim"),
        (
            {"rope_scaling": {k: v for k, v in YARN.items() if k != "beta_fast"}},
            "needs finite numbers > 0 for beta_fast",
        ),
        ({"layer_types": ["full_attention"] * 6}, "a window in every second layer from the first on; try: "),
        ({"attention_bias": False}, "attention_bias=false of "),
        ({"swiglu_limit": 5.0}, "swiglu_limit=5.0 of "),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 of "),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
    ],
)
def test_what_vllm_reads_otherwise_is_refused(sinks_config, tmp_path, changes, expected) -> None:
    """Would not catch a number that vLLM's code takes for granted and no key has."""
    write_model(tmp_path / "model", **SINKS | changes)
    (problem,) = problems(sinks_config)
    assert expected in problem


def test_sinks_are_not_copied(sinks_config) -> None:
    """float16 by name. Would not catch another copy that vLLM makes."""
    for role in (sinks_config.actor_rollout_ref.actor, sinks_config.actor_rollout_ref.ref, sinks_config.critic):
        role.megatron.dtype = "float16"
    assert any("dtype=float16 is not supported for" in problem for problem in problems(sinks_config))


SIZES = {"intermediate_size": 32, "vocab_size": 64, "num_key_value_heads": 2, "layer_types": None}


def test_codes_are_unpacked_and_that_is_said(tmp_path) -> None:
    """One line, of stacks alone, where config.json speaks of 4 bits. Would not catch codes of another format."""
    folder = Path(write_model(tmp_path / "model", **SINKS | FOUR_BITS))
    write_tensors(folder / "model.safetensors", CODES | {"model.norm.weight": "BF16"})
    sizes, faults = read_model_folder("model", ModelFolder(folder))
    assert faults == [] and sizes.unread is None
    assert sizes.unpacked == (
        f"of {folder} 1 tensors are in 4 bits (MXFP4): they are unpacked when they are read, and exports have them "
        "in the training dtype, without quantization_config"
    )


@pytest.mark.parametrize(
    ("settings", "types", "expected"),
    [
        (SINKS, CODES, f"and holds {STACK}_blocks, {STACK}_scales"),
        (SINKS | FOUR_BITS, {f"{STACK}_blocks": "I8"}, f"and holds {STACK}_blocks"),
        (SINKS | FOUR_BITS, {"model.layers.0.self_attn.q_proj.weight_blocks": "U8"}, "q_proj.weight_blocks"),
        (SINKS | FOUR_BITS, {STACK: "U8"}, f"{STACK} in model.safetensors is of type U8"),
    ],
)
def test_other_bytes_are_refused(tmp_path, settings, types, expected) -> None:
    """Without a word in config.json, of other types, of other tensors. Would not catch codes of the wrong shape."""
    folder = Path(write_model(tmp_path / "model", **settings))
    write_tensors(folder / "model.safetensors", types)
    _, (fault,) = read_model_folder("model", ModelFolder(folder))
    assert expected in str(fault)


def test_no_line_without_codes(tmp_path) -> None:
    """A folder whose weights are floats already. Would not catch a config.json that lies."""
    folder = write_model(tmp_path / "model", **SINKS | FOUR_BITS)
    assert json.loads(Path(folder, "config.json").read_text())["quantization_config"]
    sizes, _ = read_model_folder("model", ModelFolder(folder))
    assert sizes.unpacked is None
