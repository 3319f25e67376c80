"""Tiny random Gemma-4 language models, dense, with values of their own and with keys for values."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, save
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

# Windows are shorter than prompts and answers, bounds such that forgetting one is noticed.
GEMMA4 = SIZES | {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 12,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 50_000.0, "partial_rotary_factor": 0.25},
    },
}


def save_gemma4(folder: Path, **changes) -> str:
    """A Gemma-4 with windows in layers 0 and 2, heads twice as wide in the others, and scales of layers."""
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(Gemma4TextConfig(**{**GEMMA4, **changes}))
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("layernorm.weight", "model.norm.weight", "layer_scalar")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    path = save(model, folder)
    # Products are not scaled: with larger norms transformers itself is 7e-5 off its own float64.
    file = Path(path, "model.safetensors")
    tensors = {name: 0.2 * own if name.endswith("q_norm.weight") else own for name, own in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def save_gemma4_with_keys_for_values(folder: Path, **changes) -> str:
    """The same with as many heads of keys as of queries in the wide layers, which are their values, too."""
    return save_gemma4(folder, **{"attention_k_eq_v": True, "num_global_key_value_heads": 4} | changes)
