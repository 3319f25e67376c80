"""Model folders whose linears are rounded as FP8 rollouts round them, by the rounding of training in FP8."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK = 32
STACKS = (".experts.gate_up_proj", ".experts.down_proj")
"""Of gpt-oss: transposed, which square blocks do not see."""
OF_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
OF_DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj")
IN_EIGHT_BITS = tuple(
    f".{name}.weight"
    for name in (*(f"{each}_proj" for each in ("q", "k", "v", "o", "gate", "up", "down")), *OF_LATENT, *OF_DELTA)
)


def rounded_folder(path: str, folder: str, base: str | None = None) -> str:
    """A copy of a model folder whose linears are as 8 bits hold them. base: the folder that is rounded, to which the
    difference of `path` from it is added unrounded, as adapters are; None: `path`.
    """
    from megatron_rl.model.eight_bits import E4M3, rounded

    shutil.copytree(path, folder)
    (file,) = Path(folder).glob("*.safetensors")
    tensors = load_file(file)
    bases = tensors if base is None else load_file(next(Path(base).glob("*.safetensors")))
    for name, tensor in tensors.items():
        if name.endswith(IN_EIGHT_BITS):
            tensors[name] = tensor - bases[name] + rounded(bases[name], E4M3, (BLOCK, BLOCK))
        elif name.endswith(STACKS):
            tensors[name] = torch.stack([rounded(each.contiguous(), E4M3, (BLOCK, BLOCK)) for each in tensor])
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def num_bytes(name: str, tensor: torch.Tensor, element: int) -> int:
    """Bytes of a folder's tensor in generation: a code for each element and a float32 scale for each block, or
    elements of `element` bytes.
    """
    if not name.endswith((*IN_EIGHT_BITS, *STACKS)):
        return tensor.numel() * element
    return tensor.numel() + 4 * math.prod(size // BLOCK for size in tensor.shape[-2:]) * math.prod(tensor.shape[:-2])
