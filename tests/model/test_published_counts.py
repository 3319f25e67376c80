"""Parameters of published models, counted by their parts and by transformers."""

from __future__ import annotations

import pytest
import torch
import transformers

from megatron_rl.model.families import Model

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "num_hidden_layers": 62,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 200064,
    "tie_word_embeddings": False,
    "max_position_embeddings": 196608,
    "rotary_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
}
PUBLISHED = {
    "MiniMax-M2": (MINIMAX, 228_689_748_992),
    "gpt-oss-20b": (GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}, 20_914_757_184),
    "gpt-oss-120b": (GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}, 116_829_156_672),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name: str) -> None:
    """Equal to the last one, and to the model cards' 229, 20.9 and 116.8 billion. Would not catch a config.json that
    says otherwise than the numbers here.
    """
    settings, count = PUBLISHED[name]
    (architecture,) = settings["architectures"]
    model_class = getattr(transformers, architecture)
    with torch.device("meta"):
        reference = model_class(model_class.config_class(**settings))
    ours = Model.of(settings)
    assert ours.num_params == sum(parameter.numel() for parameter in reference.parameters())
    assert ours.num_params == count
