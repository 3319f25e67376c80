"""What verl's settings ask of a plan: a share of a GPU, names of the Hub, longer sequences, experts that stay whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from model_folders import problems

from megatron_rl.config.load import load_config
from megatron_rl.planning.cache_rules import KVCacheSize
from megatron_rl.planning.config_json import feature_of
from megatron_rl.planning.hardware import load_hardware
from megatron_rl.planning.hub_cache import is_hub_id, with_local_models
from megatron_rl.planning.memory_report import with_kv_cache
from megatron_rl.planning.preflight import preflight, read_models
from megatron_rl.planning.run_plan import RunPlan

MODELS = Path(__file__).parents[2] / "configs" / "models"
ROLLOUT = "actor_rollout_ref.rollout"
WEIGHTS = 2 * 8_030_261_248
"""Bytes of Llama-3-8B in bfloat16."""


@pytest.fixture
def large(tmp_path):
    """GRPO on Llama-3-8B, TP4 x PP2 on 8 GPUs."""

    def large(*overrides: str):
        (tmp_path / "run.yaml").write_text("data: {train_files: a, val_files: b}\n")
        megatron = "actor_rollout_ref.actor.megatron"
        keys = [f"actor_rollout_ref.model.path={MODELS / 'llama-3-8b'}", f"{megatron}.tensor_model_parallel_size=4"]
        keys += [f"{megatron}.pipeline_model_parallel_size=2", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8"]
        keys += ["data.max_prompt_length=1024", "data.max_response_length=1024"]
        return load_config(tmp_path / "run.yaml", [*keys, *overrides])

    return large


def test_a_share_of_the_gpu_becomes_a_cache(large):
    """0.4 x 80e9 bytes without a quarter of the weights and the engine's passes; it never takes what others hold.

    Would not catch a GPU whose memory is not what its data sheet says.
    """
    gpu = load_hardware("h100")
    config = large(f"{ROLLOUT}.gpu_memory_utilization=0.4")
    assert preflight(config, config_only=True) == []
    found = with_kv_cache(config, gpu).actor_rollout_ref.rollout
    passes = RunPlan.of(with_kv_cache(config, gpu), gpu).memory.stages[0].phases["gen"]["vLLM activations"]
    assert found.gpu_memory_utilization is None
    assert found.kv_cache_memory_bytes == pytest.approx(0.4 * gpu.memory_bytes - WEIGHTS / 4 - passes, rel=0.01)
    assert config.actor_rollout_ref.rollout.kv_cache_memory_bytes == 1 << 30  # the caller's is not changed
    full = with_kv_cache(large(f"{ROLLOUT}.gpu_memory_utilization=1.0"), gpu)
    assert full.actor_rollout_ref.rollout.kv_cache_memory_bytes == RunPlan.of(full, gpu).memory.room_kv_bytes


def test_a_cache_is_never_too_small_for_the_longest(large):
    """On a GPU without room; and a share means nothing on CPUs. Would not catch a cache that cannot be had."""
    config = large(f"{ROLLOUT}.gpu_memory_utilization=0.1")
    tiny = replace(load_hardware("h100"), memory_bytes=8e9)
    found = with_kv_cache(config, tiny).actor_rollout_ref.rollout.kv_cache_memory_bytes
    assert found == KVCacheSize.of(config, read_models(config, config_only=True)[0][0]).needed_bytes(2048)
    on_cpu = large(f"{ROLLOUT}.gpu_memory_utilization=0.5", "trainer.device=cpu")
    assert with_kv_cache(on_cpu, load_hardware("cpu")).actor_rollout_ref.rollout.kv_cache_memory_bytes == 1 << 30


def test_longer_sequences_than_the_model_was_made_for(config):
    """64 positions by config.json, 128 as told. Would not catch a kernel that stops at the former."""
    config.data.max_response_length = 60
    config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu = 128
    assert "must be <= max_position_embeddings(64)" in problems(config)[0]
    config.actor_rollout_ref.model.override_config.max_position_embeddings = 128
    assert problems(config) == []
    config.actor_rollout_ref.model.override_config.max_position_embeddings = 70
    assert "override_config.max_position_embeddings(70)" in problems(config)[0]


def test_whole_experts_cannot_be_dropped_for_parts_of_them(moe_config):
    """ETP1 with rollout TP2: a rank trains whole experts and generates with halves. Would not catch a dense model."""
    megatron = moe_config.actor_rollout_ref.actor.megatron
    for role in (moe_config.actor_rollout_ref.actor, moe_config.actor_rollout_ref.ref, moe_config.critic):
        role.megatron.expert_tensor_parallel_size, role.megatron.expert_model_parallel_size = 1, 4
    assert problems(moe_config) == [] and megatron.tensor_model_parallel_size == 2
    moe_config.actor_rollout_ref.rollout.drop_train_weights = True
    (problem,) = problems(moe_config)
    assert f"{ROLLOUT}.tensor_model_parallel_size=2 must divide training's etp(1)" in problem and problem.endswith(
        ": 1"
    )


def test_names_of_the_hub_are_looked_up_in_the_local_cache(config, tmp_path, monkeypatch):
    """The snapshot that is there, else a clear word. Would not catch a cache that is laid out in another way."""
    home = tmp_path / "hub"
    snapshot = home / "models--Some--Model-1B" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text((Path(config.actor_rollout_ref.model.path) / "config.json").read_text())
    (home / "models--Some--Model-1B" / "refs").mkdir()
    (home / "models--Some--Model-1B" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(home), raising=False)
    config.actor_rollout_ref.model.path = config.critic.model.path = "Some/Model-1B"
    assert is_hub_id("Some/Model-1B") and not is_hub_id(str(tmp_path)) and not is_hub_id("a/b/c")
    assert with_local_models(config).actor_rollout_ref.model.path == config.critic.model.path == str(snapshot)
    config.actor_rollout_ref.model.path = config.critic.model.path = "Some/Other"
    with_local_models(config)
    assert any("local Hugging Face cache" in problem for problem in problems(config))


@pytest.mark.parametrize(
    ("architecture", "feature"),
    [
        ("Qwen2_5_VLForConditionalGeneration", "vision-language models"),
        ("DeepseekV32ForCausalLM", "sparse attention"),
        ("Gemma3ForConditionalGeneration", "vision-language models"),
        ("BloomForCausalLM", "models of this architecture"),
    ],
)
def test_models_that_are_not_here_have_names(architecture, feature):
    """Would not catch an architecture that needs more than its name says."""
    assert feature_of(architecture) == feature
