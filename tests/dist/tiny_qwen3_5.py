"""Tiny random models with layers of the gated delta rule: Qwen3-Next, Qwen3.5 and Qwen3.5 with experts."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_models import QWEN3, save
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

# Heads of keys and of values of different number and size; every second layer is linear, so each half has both kinds.
DELTA = QWEN3 | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}


def save_qwen3_5(folder: Path, **changes) -> str:
    """A language model of Qwen3.5, dense."""
    torch.manual_seed(0)
    return save(drawn(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**DELTA, **changes}))), folder)


def save_qwen3_5_moe(folder: Path, **changes) -> str:
    """The same with 6 experts, 2 to a token, and a gated shared one beside them, in all layers."""
    torch.manual_seed(0)
    settings = {name: value for name, value in DELTA.items() if name != "intermediate_size"}
    return save(drawn(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**{**settings, **EXPERTS, **changes}))), folder)


def save_qwen3_next(folder: Path, **changes) -> str:
    """A Qwen3-Next, whose projections lie together for each head of keys; layer 3 has no experts."""
    torch.manual_seed(0)
    settings = {**DELTA, **EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [3], **changes}
    return save(drawn(Qwen3NextForCausalLM(Qwen3NextConfig(**settings))), folder)


def drawn(model: torch.nn.Module) -> torch.nn.Module:
    """Draw what transformers makes equal for all heads, so that mixing heads up is noticed.

    Keys resemble queries: a head whose answer is almost 0 would be normalised, with all errors of rounding in it.
    """
    settings = model.config.get_text_config()
    keys, size = settings.linear_num_key_heads, settings.linear_key_head_dim
    rows = keys * size
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            torch.nn.init.uniform_(parameter, -1.0, 1.0)
        elif name.endswith("A_log"):
            torch.nn.init.uniform_(parameter, -3.0, 0.0)
        elif name.endswith("conv1d.weight"):
            torch.nn.init.uniform_(parameter, -1.0, 1.0)
            parameter.data[rows : 2 * rows] = parameter.data[:rows]
        elif name.endswith("in_proj_qkv.weight"):
            parameter.data[rows : 2 * rows].mul_(0.5).add_(parameter.data[:rows])
        elif name.endswith("in_proj_qkvz.weight"):
            heads = parameter.data.unflatten(0, (keys, -1))
            heads[:, size : 2 * size].mul_(0.5).add_(heads[:, :size])
        elif name.endswith("linear_attn.norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model
