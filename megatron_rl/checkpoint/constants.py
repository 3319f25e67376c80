"""Constants: tensors of a Hugging Face folder that training reads, never changes, and copies into exported folders.

Constants are no parameters: optimizer, weight exchange and saved state leave them out. A process reads them from the
folder that its role starts from, or from the file next to a checkpoint's config.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_rl.checkpoint.hf_import import HFFolder
from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.model.families import Constant, Model, family_of, routing_of

FILE = "constants.safetensors"
"""The file of constants next to a checkpoint's config.json, where no other tensors are."""


def constants_of(settings: Mapping[str, Any]) -> dict[str, Constant]:
    """Megatron name -> constant for the model of a config.json, which may leave out keys with defaults."""
    # Of other models a config.json may leave sizes out.
    family = family_of(settings["architectures"])
    has_some = family.style.layer_scales or routing_of(family, settings) is not None
    return Model.of(settings).constants if has_some else {}


@torch.no_grad()
def load_constants(buffers: Mapping[str, torch.Tensor], constants: Mapping[str, Constant], folder: HFFolder) -> None:
    """Fill those of a model's buffers (global Megatron names) that are constants.

    Raises ConfigError when one is missing in the folder or has another shape.
    """
    for name, constant in constants.items():
        if name in buffers:
            _copy(folder, constant, buffers[name])


def read_constants(
    constants: Iterable[Constant], folder: Path, device: torch.device, dtype: torch.dtype | None = torch.float32
) -> dict[str, torch.Tensor]:
    """Read all constants, by name; {} if there are none. dtype: None keeps the folder's dtypes."""
    tensors: dict[str, torch.Tensor] = {}
    wanted = list(constants)
    if not wanted:
        return tensors
    source = HFFolder(folder)
    for constant in wanted:
        own = source.dtype(constant.name) if dtype is None else dtype
        tensors[constant.name] = torch.empty(constant.shape, dtype=own, device=device)
        _copy(source, constant, tensors[constant.name])
    return tensors


def _copy(folder: HFFolder, constant: Constant, into: torch.Tensor) -> None:
    folder.copy_box(constant.name, tuple((0, size) for size in constant.shape), constant.shape, into)


def keep_constants(source: Path, target: Path) -> str | None:
    """Write a folder's constants to `target`; returns the file's name, None if there are no constants."""
    constants = constants_of(ModelFolder(source).settings).values()
    kept = read_constants(constants, source, torch.device("cpu"), dtype=None)
    if not kept:
        return None
    save_file(kept, target / FILE)
    return FILE
