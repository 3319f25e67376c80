"""Published config.json's of 2025 and 2026: accepted as they are, with transformers' number of parameters."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from model_folders import write_model

from megatron_rl.checkpoint.hf_config import read_hf_config
from megatron_rl.ledger.planner.folder_files import lacking_in
from megatron_rl.ledger.planner.model_folder import read_model_folder
from megatron_rl.model.families import Model

KEY = "actor_rollout_ref.model.path"
KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "eos_token_id": 163585,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}
GLM_47 = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": True,
    "vocab_size": 151552,
}
GLM_47_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "attention_bias": False,
    "eos_token_id": [154820, 154827, 154829],
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
PUBLISHED = {"Kimi-K2": KIMI_K2, "GLM-4.7": GLM_47, "GLM-4.7-Flash": GLM_47_FLASH}
BILLIONS = {"Kimi-K2": 1026.4, "GLM-4.7": 352.8, "GLM-4.7-Flash": 29.9}
"""Without layers that predict several tokens."""


def write(folder, settings) -> str:
    path = write_model(folder, **settings)
    (folder / "config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_folders_are_accepted_with_transformers_number_of_parameters(name, tmp_path):
    """Exact, against transformers' model on meta. Would not catch a tensor in another's place."""
    path = write(tmp_path / "model", PUBLISHED[name])
    sizes, problems = read_model_folder(KEY, path, config_only=True)
    assert problems == [] and sizes is not None
    settings = read_hf_config(path)
    with torch.device("meta"):
        model = getattr(transformers, settings.architectures[0])(settings)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert Model.read(path).num_params == Model.of(settings.to_dict()).num_params == count
    assert round(count / 1e9, 1) == BILLIONS[name]


def test_a_kimi_folder_is_saved_as_transformers_reads_it(tmp_path):
    """Without the folder's own code. Would not catch a class that vLLM reads the name by."""
    path = write(tmp_path / "model", KIMI_K2 | {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}})
    settings = read_hf_config(path)
    assert type(settings) is transformers.DeepseekV3Config and settings.model_type == "deepseek_v3"
    settings.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "deepseek_v3"
    assert read_hf_config(tmp_path / "saved").rope_parameters == settings.rope_parameters


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("Kimi-K2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("GLM-4.7", {"model_type": "kimi_k2"}, "must be that of Glm4MoeForCausalLM"),
        ("Kimi-K2", {"model_type": "kimi_k25"}, "must be that of DeepseekV3ForCausalLM"),
        ("GLM-4.7-Flash", {"first_k_dense_replace": 3}, "must be 1, as mlp_layer_types says"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["sparse", "dense"] + ["sparse"] * 45}, "dense ones before sparse ones"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["dense"] * 46}, "must name 47 layers"),
    ],
)
def test_what_differs_from_them_is_refused(name, changes, said, tmp_path):
    """One fault each. Would not catch two that hide each other."""
    path = write(tmp_path / "model", PUBLISHED[name] | changes)
    _, problems = read_model_folder(KEY, path, config_only=True)
    assert [said in str(problem) for problem in problems] == [True]


def test_a_tokenizer_that_is_code_is_refused_by_its_name(tmp_path):
    """Kimi's is published so. Would not catch code that a tokenizer.json beside it makes superfluous."""
    path = write(tmp_path / "model", KIMI_K2)
    assert lacking_in(tmp_path / "model") == []
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "tokenization_kimi.py").write_text("")
    _, problems = read_model_folder(KEY, path)
    assert any("tokenization_kimi.py" in str(each) and "no code of a folder is run" in str(each) for each in problems)
