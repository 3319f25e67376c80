"""Tiny models with a multi-token prediction layer, which generation reads and updates train."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_glm import save_glm4_moe_lite
from tiny_models import SIZES, save_deepseek_v3, save_glm4_moe, save_qwen2

NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
"""DeepSeek's and GLM's names of the norms of embedding and hidden states, of the projection, and of the last norm."""
OF_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
IN_MIMO = "model.mtp_layers.0."


def add_mtp_layer(path: str, repeats: bool = True) -> str:
    """Add a layer behind the others, of the last one's tensors and small noise. A head of its own becomes the
    embedding's values. repeats: the layer guesses that a token comes again; else it guesses at random.
    """
    file, generator = Path(path, "model.safetensors"), torch.Generator().manual_seed(7)
    tensors = load_file(file)
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    prefix, hidden = f"model.layers.{last + 1}.", tensors["model.embed_tokens.weight"].shape[1]

    def noise(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(shape, generator=generator)

    before = {name: tensor for name, tensor in tensors.items() if name.startswith(f"model.layers.{last}.")}
    own = {prefix + name.split(".", 3)[3]: 0.3 * tensor + noise(*tensor.shape) for name, tensor in before.items()}
    own |= {f"{prefix}{name}.weight": 1 + noise(hidden) for name in NAMES if name != "eh_proj"}
    own[f"{prefix}eh_proj.weight"] = torch.cat([2.0 * repeats * torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    own[f"{prefix}eh_proj.weight"] += noise(hidden, 2 * hidden)
    if "lm_head.weight" in tensors:
        own["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | own, file, metadata={"format": "pt"})
    return path


def save_glm4_with_mtp(folder: Path, repeats: bool = True, **changes) -> str:
    """A GLM-4.5 of four layers, with an MTP layer."""
    return add_mtp_layer(save_glm4_moe(folder, num_nextn_predict_layers=1, **changes), repeats)


def save_deepseek_with_mtp(folder: Path, repeats: bool = True, **changes) -> str:
    """A DeepSeek-V3 of two layers, with an MTP layer."""
    return add_mtp_layer(save_deepseek_v3(folder, num_nextn_predict_layers=1, **changes), repeats)


def save_glm4_lite_with_mtp(folder: Path, repeats: bool = True, **changes) -> str:
    """A GLM-4.7-Flash of two layers, with an MTP layer; the head is the embedding."""
    settings = {"num_nextn_predict_layers": 1, "tie_word_embeddings": True, **changes}
    return add_mtp_layer(save_glm4_moe_lite(folder, **settings), repeats)


def save_mimo(folder: Path, repeats: bool = True, **changes) -> str:
    """A MiMo of four layers, which is a Qwen2 with an MTP layer of other names, whose projection takes the hidden
    states first.
    """
    settings = {"tie_word_embeddings": False, "num_nextn_predict_layers": 1, "attention_bias": True, **changes}
    path = add_mtp_layer(save_qwen2(folder, **settings), repeats)
    tensors, prefix = load_file(Path(path, "model.safetensors")), f"model.layers.{SIZES['num_hidden_layers']}."
    names = {f"{prefix}{one}.": f"{IN_MIMO}{other}." for one, other in zip(NAMES, OF_MIMO, strict=True)}
    renamed = {}
    for name, tensor in tensors.items():
        own = next((other + name.removeprefix(one) for one, other in names.items() if name.startswith(one)), name)
        renamed[own.replace(prefix, IN_MIMO)] = tensor
    projection = f"{IN_MIMO}input_proj.weight"
    renamed[projection] = torch.cat(renamed[projection].chunk(2, 1)[::-1], 1).contiguous()
    save_file(renamed, Path(path, "model.safetensors"), metadata={"format": "pt"})
    file = Path(path, "config.json")
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"})
    )
    return path


WITH_MTP: dict[str, Callable[..., str]] = {
    "GLM-4.5": save_glm4_with_mtp,
    "DeepSeek-V3": save_deepseek_with_mtp,
    "GLM-4.7-Flash": save_glm4_lite_with_mtp,
    "MiMo": save_mimo,
}
