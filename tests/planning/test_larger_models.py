"""Preflight of folders with a language model inside a larger one: config.json, names, what is carried, what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_folders import TOKENIZER, problems, write_tensors

from megatron_rl.checkpoint.hf_folder import with_dtype
from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.model.families import FAMILIES, placed_settings, rollout_settings, text_settings
from megatron_rl.planning.folder_checks import read_model_folder
from megatron_rl.rehearse.fewer_layers import cut_settings

TEXT = {
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 384,
    "intermediate_size": 192,
    "max_position_embeddings": 64,
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "num_key_value_heads": 6,
    "vocab_size": 100,
}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
QWEN3 = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "tie_word_embeddings": False,
    "text_config": TEXT | {"rope_parameters": SECTIONS, "model_type": "qwen3_vl_text"},
    "vision_config": {"depth": 2, "hidden_size": 8},
}
OLD_QWEN25 = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 4, 4]},
    "vision_config": {"depth": 2, "hidden_size": 8},
} | TEXT
NORM, VISION = "model.language_model.norm.weight", "model.visual.blocks.0.norm1.weight"


def write_folder(folder: Path, settings: dict, tensors: dict[str, str]) -> str:
    """A folder with this config.json and tensors (name -> type)."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    write_tensors(folder / "model.safetensors", tensors)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    return str(folder)


def changed(**text) -> dict:
    """Qwen3-VL's config.json with other settings of the language model."""
    return QWEN3 | {"text_config": QWEN3["text_config"] | text}


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        (QWEN3, {NORM: "BF16", "lm_head.weight": "BF16", VISION: "F8_E4M3"}),
        (OLD_QWEN25, {"model.norm.weight": "F32", "visual.blocks.0.norm1.weight": "F16"}),
    ],
    ids=["nested", "flat, of old Qwen2.5-VL"],
)
def test_the_language_model_is_read_and_the_rest_is_carried(tmp_path, settings, tensors):
    """Sizes, and a line about what is carried. Would not catch a tensor that lies under both names."""
    path = write_folder(tmp_path / "model", settings, tensors)
    sizes, found = read_model_folder("key", ModelFolder(path))
    assert found == [] and sizes.unread == (
        f"these tensors of {path} are not read: {list(tensors)[-1]}, of 16 bytes, which exports of the language model "
        "write again"
    )
    assert (sizes.num_hidden_layers, sizes.vocab_size, sizes.num_attention_heads) == (6, 100, 12)
    assert ModelFolder(path).model.num_params == sizes.parts.num_params > 6 * 384 * 384


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (QWEN3 | {"text_config": 3}, "text_config must be an object in braces, and is 3"),
        (changed(rope_parameters=SECTIONS | {"mrope_section": [6, 5, 4]}), "that add up to 16, half of a head's"),
        (changed(rope_parameters=SECTIONS | {"mrope_section": "a"}), "must be whole numbers >= 1 that add up to 16"),
        (changed(rope_parameters={"rope_type": "yarn", "factor": 2.0}), "rope_type='yarn' is not supported"),
        (changed(hidden_act="gelu"), 'hidden_act="gelu"'),
        (QWEN3 | {"model_type": "qwen2_5_vl"}, "must be that of Qwen3VLForConditionalGeneration"),
        (QWEN3 | {"quantization_config": {"bits": 4}}, "quantization_config"),
        ({key: value for key, value in QWEN3.items() if key != "text_config"}, "must be whole numbers >= 1"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, settings, rule):
    """Of the whole and of the language model inside. Would not catch a vision tower that does not fit."""
    _, found = read_model_folder("key", ModelFolder(write_folder(tmp_path / "model", settings, {NORM: "F32"})))
    assert [rule in str(one) for one in found] == [True], [str(one) for one in found]


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "visual.blocks.0.norm1.weight", "model.x"])
def test_names_of_another_layout_are_refused(tmp_path, name):
    """By the beginning that they should have. Would not catch a folder with both."""
    _, (problem,) = read_model_folder(
        "key", ModelFolder(write_folder(tmp_path / "model", QWEN3, {NORM: "F32", name: "F32"}))
    )
    assert f"must hold no weights that its config.json does not imply, and holds {name}" in str(problem)
    assert "those of its language model begin with model.language_model." in str(problem)


def test_adapters_are_merged(config, tmp_path):
    """With the key that does so. Would not catch an adapter's folder of another project."""
    write_folder(tmp_path / "model", QWEN3, {NORM: "F32"})
    assert problems(config) == []
    config.actor_rollout_ref.model.lora.rank = 8
    (problem,) = problems(config)
    assert "do not go together: the language model is inside of a larger one" in problem
    assert problem.endswith("lora.merge=true")
    config.actor_rollout_ref.model.lora.merge = True
    assert problems(config) == []


def test_vllm_gets_the_settings_of_the_language_model(tmp_path):
    """One object, with the outer word on tied matrices. Would not catch a vLLM that reads them elsewhere."""
    family = FAMILIES["Qwen3VLForConditionalGeneration"]
    for tied in (True, False):
        settings = text_settings(changed(tie_word_embeddings=not tied) | {"tie_word_embeddings": tied})
        overrides = placed_settings(family, rollout_settings(family, settings) | {"max_position_embeddings": 9})
        assert overrides == {"text_config": {"tie_word_embeddings": tied, "max_position_embeddings": 9}}
    llama = FAMILIES["LlamaForCausalLM"]
    assert placed_settings(llama, {"a": 1}) == {"a": 1} and placed_settings(family, {}) == {}


def test_the_dtype_is_replaced_where_it_is_named():
    """Outside, inside, in old spelling, nowhere. Would not catch a third place."""
    named = changed(dtype="bfloat16") | {"torch_dtype": "bfloat16"}
    written = with_dtype(named, "float32")
    assert (written["torch_dtype"], written["text_config"]["dtype"]) == ("float32", "float32")
    assert with_dtype(QWEN3, "float32") == QWEN3 and with_dtype(OLD_QWEN25, "float32") == OLD_QWEN25


def test_a_shortened_model_keeps_what_is_around(tmp_path):
    """Layers are cut inside. Would not catch layers of a vision tower, which are never built."""
    cut = cut_settings(changed(layer_types=["a"] * 6), 2)
    assert cut["vision_config"] == QWEN3["vision_config"]
    assert (cut["text_config"]["num_hidden_layers"], cut["text_config"]["layer_types"]) == (2, ["a", "a"])
    assert cut_settings(OLD_QWEN25, 2)["num_hidden_layers"] == 2
