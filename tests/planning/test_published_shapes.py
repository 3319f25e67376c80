"""Published config.json's of 2025 and 2026: accepted as they are, with transformers' number of parameters."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from model_folders import write_model

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import Model
from megatron_rl.planning.folder_checks import read_model_folder
from megatron_rl.planning.folder_files import lacking_in

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
GEMMA_4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "attention_bias": False,
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
}
"""The language model of Gemma-4 31B, in a folder of its own."""
GEMMA_4_DEFAULT = {
    name: GEMMA_4[name] for name in ("architectures", "model_type", "hidden_size_per_layer_input", "vocab_size")
} | {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8}
GEMMA_4_DEFAULT["max_position_embeddings"] = 131072
"""What transformers has where config.json has nothing, but for embeddings of every layer."""
PUBLISHED = {"Kimi-K2": KIMI_K2, "GLM-4.7": GLM_47, "GLM-4.7-Flash": GLM_47_FLASH}
PUBLISHED |= {"Gemma-4 31B": GEMMA_4, "Gemma-4": GEMMA_4_DEFAULT}
BILLIONS = {"Kimi-K2": 1026.4, "GLM-4.7": 352.8, "GLM-4.7-Flash": 29.9, "Gemma-4 31B": 30.7, "Gemma-4": 3.0}
"""Without layers that predict several tokens."""


def write(folder, settings) -> str:
    path = write_model(folder, **settings)
    (folder / "config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_folders_are_accepted_with_transformers_number_of_parameters(name, tmp_path):
    """Exact, against transformers' model on meta. Would not catch a tensor in another's place."""
    path = write(tmp_path / "model", PUBLISHED[name])
    sizes, problems = read_model_folder(KEY, ModelFolder(path), config_only=True)
    assert problems == [] and sizes is not None
    settings = ModelFolder(path).hf_config
    with torch.device("meta"):
        model = getattr(transformers, settings.architectures[0])(settings)
    count = sum(parameter.numel() for parameter in model.parameters())  # a tied matrix once
    assert ModelFolder(path).model.num_params == Model.of(settings.to_dict()).num_params == count
    assert round(count / 1e9, 1) == BILLIONS[name]


def test_a_kimi_folder_is_saved_as_transformers_reads_it(tmp_path):
    """Without the folder's own code. Would not catch a class that vLLM reads the name by."""
    path = write(tmp_path / "model", KIMI_K2 | {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}})
    settings = ModelFolder(path).hf_config
    assert type(settings) is transformers.DeepseekV3Config and settings.model_type == "deepseek_v3"
    settings.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "deepseek_v3"
    assert ModelFolder(tmp_path / "saved").hf_config.rope_parameters == settings.rope_parameters


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("Kimi-K2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("GLM-4.7", {"model_type": "kimi_k2"}, "must be that of Glm4MoeForCausalLM"),
        ("Kimi-K2", {"model_type": "kimi_k25"}, "must be that of DeepseekV3ForCausalLM"),
        ("GLM-4.7-Flash", {"first_k_dense_replace": 3}, "must be 1, as mlp_layer_types says"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["sparse", "dense"] + ["sparse"] * 45}, "dense ones before sparse ones"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["dense"] * 46}, "must name 47 layers"),
        ("Gemma-4", {"hidden_size_per_layer_input": 256}, "embeddings of every layer, as in E2B and E4B"),
        ("Gemma-4", {"num_kv_shared_layers": 20}, "layers that use the keys and values of others"),
        ("Gemma-4", {"use_bidirectional_attention": "vision"}, "use_bidirectional_attention"),
        ("Gemma-4", {"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "must divide num_attention_heads(8)"),
        ("Gemma-4", {"per_layer_config": {"5": {"head_dim": 512}}}, "must have equal heads for the layers of"),
        ("Gemma-4", {"per_layer_config": {"5": {"sliding_window": 5}}, "num_hidden_layers": 6}, "must have none but"),
        (
            "Gemma-4",
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "factor": 2.0}}},
            "because vLLM does not read it",
        ),
        ("Gemma-4", {"rope_parameters": {"full_attention": {"rope_type": "llama3"}}}, "known: default, proportional"),
        (
            "Gemma-4",
            {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor=0.5 is not supported",
        ),
    ],
)
def test_what_differs_from_them_is_refused(name, changes, said, tmp_path):
    """One fault each. Would not catch two that hide each other."""
    path = write(tmp_path / "model", PUBLISHED[name] | changes)
    _, problems = read_model_folder(KEY, ModelFolder(path), config_only=True)
    assert [said in str(problem) for problem in problems] == [True]


def test_experts_beside_an_mlp_are_refused_with_their_reason(tmp_path):
    """Gemma-4 26B-A4B. Would not catch a number of experts that transformers ignores."""
    path = write(tmp_path / "model", GEMMA_4 | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8})
    _, problems = read_model_folder(KEY, ModelFolder(path), config_only=True)
    assert len(problems) == 2 and all(
        "experts in parallel with a dense MLP, as in 26B-A4B" in str(each) for each in problems
    )


def test_embeddings_of_every_layer_are_transformers_default(tmp_path):
    """So a config.json without the key is refused, too. Would not catch another default of a later version."""
    settings = {name: value for name, value in GEMMA_4.items() if name != "hidden_size_per_layer_input"}
    _, problems = read_model_folder(KEY, ModelFolder(write(tmp_path / "model", settings)), config_only=True)
    assert [str(problem).startswith("hidden_size_per_layer_input=256 of") for problem in problems] == [True]


def test_tp_divides_both_numbers_of_heads(tmp_path):
    """Gemma-4 31B has 16 heads of keys in most layers and 4 in the others. Would not catch a layout that ignores it."""
    sizes, _ = read_model_folder(KEY, ModelFolder(write(tmp_path / "model", GEMMA_4)), config_only=True)
    assert sizes.tp_divides["num_global_key_value_heads"] == 4 and sizes.max_tp == 4
    wide, usual = sizes.parts.layers[5].attention, sizes.parts.layers[0].attention
    assert (wide.head_size, wide.num_kv_heads, wide.values_are_keys, wide.window) == (512, 4, True, None)
    assert (usual.head_size, usual.num_kv_heads, usual.values_are_keys, usual.window) == (256, 16, False, 1024)
    assert sizes.parts.cached_elements(2) == 50 * 2 * 8 * 256 + 10 * 2 * 2 * 512


def test_code_of_a_tokenizer_is_not_run_and_nobody_is_asked(tmp_path):
    """Kimi's tokenizer_config.json names a class of its own. Would not catch code beside another file."""
    path = write(tmp_path / "model", KIMI_K2)
    own = {"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_kimi.T", None]}}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "model" / "tokenization_kimi.py").write_text("raise SystemExit(3)")
    with pytest.raises(ConfigError, match="asks for code of its own, tokenization_kimi.T, and no code of a folder"):
        _ = ModelFolder(path).tokenizer


def test_a_tokenizer_that_is_code_is_refused_by_its_name(tmp_path):
    """Kimi's is published so. Would not catch code that a tokenizer.json beside it makes superfluous."""
    path = write(tmp_path / "model", KIMI_K2)
    assert lacking_in(tmp_path / "model") == []
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "tokenization_kimi.py").write_text("")
    _, problems = read_model_folder(KEY, ModelFolder(path))
    assert any("tokenization_kimi.py" in str(each) and "no code of a folder is run" in str(each) for each in problems)
