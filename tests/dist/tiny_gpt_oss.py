"""A tiny gpt-oss of OpenAI's, plain or in 4 bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, save
from transformers import GptOssConfig, GptOssForCausalLM

# A window shorter than prompts and answers, and frequencies some of which yarn keeps and some of which it divides.
GPT_OSS = SIZES | {
    "head_dim": 32,
    "intermediate_size": 96,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 12,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}


def save_gpt_oss(folder: Path, **changes) -> str:
    """A gpt-oss of 6 experts, 2 to a token: gates beyond their bounds, biases and sinks large enough to be noticed."""
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**{**GPT_OSS, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith("gate_up_proj_bias"):
            torch.nn.init.normal_(parameter, std=4.0)
        elif name.endswith(("down_proj_bias", "sinks")):
            torch.nn.init.normal_(parameter, std=0.5)
    return save(model, folder)


def save_gpt_oss_in_4_bits(folder: Path, **changes) -> str:
    """The same as it is published: experts in MXFP4, the rest in bfloat16, and a config.json that says so."""
    path = Path(save_gpt_oss(folder, **changes))
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor.bfloat16()
            continue
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = in_4_bits(tensor.transpose(1, 2))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return str(path)


def in_4_bits(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [E, rows, columns], rounded to MXFP4: blocks uint8 [E, rows, G, 16] and scales uint8 [E, rows, G]."""
    groups = weights.unflatten(-1, (-1, 32))
    # The largest number of a group is between 4 and 8 times its power of two, or is rounded to 6.
    exponents = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30).log2().floor() - 2
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = groups / exponents.exp2()
    codes = (scaled.abs()[..., None] - values).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]
    return blocks.to(torch.uint8).contiguous(), (exponents[..., 0] + 127).to(torch.uint8)


def unpack_by_transformers(path: str, target: Path, dtype: torch.dtype) -> str:
    """Write a folder in 4 bits as a plain one, with transformers' own function."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed = load_file(Path(path, "model.safetensors"))
    tensors = {}
    for name, tensor in packed.items():
        if name.endswith("_blocks"):
            plain = name.removesuffix("_blocks")
            tensors[plain] = convert_moe_packed_tensors(tensor, packed[f"{plain}_scales"]).to(dtype)
        elif not name.endswith("_scales"):
            tensors[name] = tensor.to(dtype)
    shutil.copytree(path, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(Path(path, "config.json").read_text())
    del config["quantization_config"]
    config["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config))
    return str(target)
