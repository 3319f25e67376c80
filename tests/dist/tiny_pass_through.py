"""Tiny models with tensors that nothing reads and that exports write again."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_deepseek_v3, save_glm4_moe


def add_layer_ahead(path: str) -> str:
    """Add a layer that predicts one token more behind the four or two others, of three types."""
    file = Path(path, "model.safetensors")
    tensors, generator = load_file(file), torch.Generator().manual_seed(7)
    number = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    prefix = f"model.layers.{number}."
    whole = {name: tensor for name, tensor in tensors.items() if name.startswith(f"model.layers.{number - 1}.")}
    own = {prefix + name.split(".", 3)[3]: torch.randn(old.shape, generator=generator) for name, old in whole.items()}
    own |= {f"{prefix}{name}.weight": torch.randn(128, generator=generator) for name in ("enorm", "hnorm")}
    kept = {name: tensor.bfloat16() for name, tensor in own.items()}
    kept[f"{prefix}eh_proj.weight"] = torch.randn(128, 256, generator=generator).to(torch.float8_e4m3fn)
    kept[f"{prefix}eh_proj.weight_scale_inv"] = torch.tensor([[float("nan")]])
    save_file(tensors | kept, file, metadata={"format": "pt"})
    return path


def save_glm4_with_layer_ahead(folder: Path) -> str:
    """A GLM-4.5 of four layers and one that predicts a token more."""
    return add_layer_ahead(save_glm4_moe(folder, num_nextn_predict_layers=1))


def save_deepseek_v3_with_layer_ahead(folder: Path) -> str:
    """A DeepSeek-V3 of two layers and one that predicts a token more."""
    return add_layer_ahead(save_deepseek_v3(folder, num_nextn_predict_layers=1))
