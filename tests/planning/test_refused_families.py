"""Architectures that are refused by name, by `family_of` and by preflight of a folder."""

from __future__ import annotations

import re

import pytest
from model_folders import EXPERTS, write_model

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import FAMILIES, family_of
from megatron_rl.model.families.refused import REFUSED, refusal_of
from megatron_rl.planning.folder_checks import read_model_folder

SENTENCES = {
    "Gemma3nForCausalLM": ("wrong at rollout TP > 1", "Gemma3ForCausalLM"),
    "Gemma3nForConditionalGeneration": ("see and hear", "Gemma3ForCausalLM"),
    "NemotronHForCausalLM": ("copies A = -exp(A_log) at load", "Qwen3MoeForCausalLM"),
    "Llama4ForCausalLM": ("attention in chunks", "LlamaForCausalLM"),
    "Llama4ForConditionalGeneration": ("vision-language models", "LlamaForCausalLM"),
    "KimiLinearForCausalLM": ("gated delta rule", "DeepseekV3ForCausalLM"),
    "KimiK25ForConditionalGeneration": (
        "K2's language model in a folder of its own is supported",
        "DeepseekV3ForCausalLM",
    ),
    "DeepseekV32ForCausalLM": ("sparse attention", "DeepseekV3ForCausalLM"),
    "GlmMoeDsaForCausalLM": ("sparse attention", "Glm4MoeForCausalLM"),
}


@pytest.mark.parametrize("architecture", SENTENCES)
def test_what_is_missing_is_said_by_name(architecture, tmp_path):
    """By both ways to a family. Would not catch a model whose config.json claims another architecture."""
    needs, nearest = SENTENCES[architecture]
    with pytest.raises(ConfigError, match=f"needs .*{re.escape(needs)}.*; try: {nearest}; known: "):
        family_of([architecture])
    path = write_model(tmp_path / "model", **EXPERTS | {"architectures": [architecture]})
    sizes, (problem,) = read_model_folder("actor_rollout_ref.model.path", ModelFolder(path))
    assert sizes is None and problem.nearest == {"architectures": [nearest]}
    assert f"{architecture} needs" in problem.hint and needs in problem.hint


def test_the_table_names_supported_architectures_alone_as_nearest():
    """Would not catch a nearest that has other sizes. The last row fits every name."""
    assert {refusal.nearest for refusal in REFUSED} - {""} <= FAMILIES.keys()
    assert refusal_of("BloomForCausalLM").needs == "models of this architecture"
    with pytest.raises(ConfigError, match="needs models of this architecture; try: .*ForCausalLM; known: "):
        family_of(["BloomForCausalLM"])
