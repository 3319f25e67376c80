"""A tiny random GLM-4.7-Flash."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_models import LATENT, save
from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM


def save_glm4_moe_lite(folder: Path, **changes) -> str:
    """Latent attention, experts by sigmoid scores and a bias that changes choices; the first of two layers is dense."""
    torch.manual_seed(0)
    own = {"q_lora_rank": 96, "routed_scaling_factor": 1.8, "norm_topk_prob": True, "rms_norm_eps": 1e-4}
    settings = {name: size for name, size in LATENT.items() if name != "first_k_dense_replace"} | own | changes
    model = Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**settings))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    return save(model, folder)
