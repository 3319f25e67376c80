"""A tiny MiniMax-M2."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_models import SIZES, save
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

MINIMAX = SIZES | {
    "head_dim": 32,
    "intermediate_size": 48,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rotary_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


def save_minimax(folder: Path, **changes) -> str:
    """A MiniMax-M2 of 6 experts, 2 to a token: half of a head turns, and a bias changes choices."""
    torch.manual_seed(0)
    model = MiniMaxM2ForCausalLM(MiniMaxM2Config(**{**MINIMAX, **changes}))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    return save(model, folder)
