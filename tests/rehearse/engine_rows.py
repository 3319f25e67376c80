"""One engine of each family of `model/families`: what is changed in transformers' defaults, which are the sizes of a
published model, and the attention of vLLM that has to be chosen on a Hopper GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING

from megatron_rl.model.families import FAMILIES

LONG = {"max_position_embeddings": 8192}
"""Where the default is shorter than the recipe's rows."""


class Row(NamedTuple):
    """changes: of the default settings; None takes one away."""

    changes: dict[str, Any] = {}
    backend: str = "FLASH_ATTN"


LATENT = "FLASH_ATTN_MLA"
ROWS = {
    "DeepseekV2ForCausalLM": Row(
        LONG | {"moe_intermediate_size": 1408, "num_experts_per_tok": 6, "first_k_dense_replace": 1}, LATENT
    ),
    "DeepseekV3ForCausalLM": Row({}, LATENT),
    "Gemma2ForCausalLM": Row(),
    "Gemma3ForCausalLM": Row(),
    "Gemma3ForConditionalGeneration": Row(),
    "Gemma4ForCausalLM": Row(
        {
            "per_layer_config": None,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
        },
        "TRITON_ATTN",  # its heads of full attention are wider than FlashAttention's
    ),
    "Glm4MoeForCausalLM": Row({"head_dim": 128}),
    "Glm4MoeLiteForCausalLM": Row({}, LATENT),
    "GptOssForCausalLM": Row(),
    "LlamaForCausalLM": Row(LONG),
    "MiMoForCausalLM": Row(),
    "MiniMaxM2ForCausalLM": Row(),
    "MistralForCausalLM": Row(),
    "MixtralForCausalLM": Row(),
    "Qwen2ForCausalLM": Row(),
    "Qwen2MoeForCausalLM": Row(),
    "Qwen2_5_VLForConditionalGeneration": Row(),
    "Qwen3ForCausalLM": Row(),
    "Qwen3MoeForCausalLM": Row(),
    "Qwen3NextForCausalLM": Row(),
    "Qwen3VLForConditionalGeneration": Row(),
    "Qwen3VLMoeForConditionalGeneration": Row(),
    "Qwen3_5ForCausalLM": Row(),
    "Qwen3_5ForConditionalGeneration": Row(),
    "Qwen3_5MoeForCausalLM": Row(),
    "Qwen3_5MoeForConditionalGeneration": Row(),
}
OFTEN = ("DeepseekV3ForCausalLM", "Gemma4ForCausalLM", "GptOssForCausalLM", "Qwen3_5MoeForConditionalGeneration")
"""Each kind of attention once; the others are weekly."""


def write_folder(architecture: str, folder: Path) -> str:
    """Write the config.json of a row; returns its folder."""
    settings = CONFIG_MAPPING[FAMILIES[architecture].model_type]().to_dict() | ROWS[architecture].changes
    known = {name: value for name, value in settings.items() if value is not None or name in ("q_lora_rank",)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(known | {"architectures": [architecture], "dtype": "bfloat16"}))
    return str(folder)
