"""Tensors of a folder as bytes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def raw(folder: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    """Every tensor of a folder: its dtype and its bytes. The index names each where it lies."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors[name] = (tensor.dtype, bytes(tensor.flatten().view(torch.uint8).tolist()))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        assert content["weight_map"].keys() == tensors.keys()
        assert content["metadata"]["total_size"] == sum(len(data) for _, data in tensors.values())
    return tensors
