"""PEFT's folder of an adapter: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from megatron_rl.errors import ConfigError
from megatron_rl.model.families import ParamSpec
from megatron_rl.parallel.sharding import Place, box_index, shard_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
}
"""Settings that may have these values only, or be absent."""


@dataclass(frozen=True)
class PeftFolder:
    """An adapter on disk. rank, alpha: of all its matrices. names: of its tensors."""

    path: Path
    rank: int
    alpha: float
    names: frozenset[str]

    @classmethod
    def open(cls, path: str | Path) -> PeftFolder:
        """Read settings and names. Raises ConfigError for half a folder, and for settings that are not plain LoRA."""
        folder = Path(path).expanduser()
        for file in (CONFIG, WEIGHTS):
            if not (folder / file).is_file():
                raise ConfigError(f"{folder} is no PEFT folder: it must have {CONFIG} and {WEIGHTS}, and lacks {file}")
        try:
            settings = json.loads((folder / CONFIG).read_text())
            rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
            with safe_open(folder / WEIGHTS, "pt") as tensors:
                names = frozenset(tensors.keys())
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
            raise ConfigError(f"the adapter in {folder} cannot be read: {type(error).__name__}: {error}") from error
        for key, allowed in PLAIN.items():
            if key in settings and settings[key] not in allowed:
                raise ConfigError(f"{folder / CONFIG}: {key}={settings[key]} must be {allowed[0]}: plain LoRA is read")
        return cls(folder, rank, alpha, names)

    def read(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """One tensor [rows, columns]. Raises ConfigError if it is missing, misshapen or not finite."""
        if name not in self.names:
            raise ConfigError(f"{self.path / WEIGHTS} has no {name}")
        with safe_open(self.path / WEIGHTS, "pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
        if tensor.shape != (rows, columns):
            raise ConfigError(f"{name} in {self.path} is {list(tensor.shape)}, the model implies {[rows, columns]}")
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"{self.path / WEIGHTS} cannot be used: an element of {name} is NaN or infinite")
        return tensor


@torch.no_grad()
def load_adapters(
    parameters: Mapping[str, torch.Tensor], specs: Mapping[str, ParamSpec], folder: PeftFolder, place: Place
) -> None:
    """Fill this rank's adapters (global names) from a PEFT folder, with zeros beyond the folder's rank.

    specs: of all adapters. Raises ConfigError where the folder has other tensors than `specs` name.
    """
    wanted = {spec.hf_names[0] for spec in specs.values()}
    if wanted != folder.names:
        lacking, further = sorted(wanted - folder.names)[:3], sorted(folder.names - wanted)[:3]
        raise ConfigError(
            f"{folder.path} has other adapters than target_modules asks for: it lacks {lacking or 'none'}, and has "
            f"{further or 'none'} besides"
        )
    for name, parameter in parameters.items():
        spec = specs[name]
        rows, columns = spec.tensor.segments[0].shape
        is_a = name.endswith("lora_A")
        shape = (folder.rank, columns) if is_a else (rows, folder.rank)
        whole = folder.read(spec.hf_names[0], *shape)
        whole = F.pad(whole, (0, columns - shape[1], 0, rows - shape[0]))
        for part in shard_of(spec.tensor, place).parts:
            parameter[part.index].copy_(whole[box_index(part.box)])
