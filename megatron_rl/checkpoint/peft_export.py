"""Write a PEFT folder of trained adapters, from many ranks or from one process: one file, for adapters are small."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.checkpoint.adapter_files import BASE, CONFIG, WEIGHTS
from megatron_rl.checkpoint.hf_export import ScatteredTensors
from megatron_rl.checkpoint.hf_folder import ExportFile, write_files
from megatron_rl.checkpoint.identity import WEIGHTS as DIGEST


@dataclass(frozen=True)
class PeftSettings:
    """What adapter_config.json says. base: the model's folder. targets: as of `peft_targets`.

    heads: modules that are trained whole next to adapters: a classifier's score. digest: of the base's weights, as of
    `folder_digest`.
    """

    base: Path
    rank: int
    alpha: float
    targets: tuple[str, ...]
    heads: tuple[str, ...] = ()
    digest: str | None = None

    def write(self, folder: Path) -> None:
        """Write adapter_config.json, and a file that names the base by its digest."""
        alpha = int(self.alpha) if self.alpha == int(self.alpha) else self.alpha
        content: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if self.heads else "CAUSAL_LM",
            "base_model_name_or_path": str(self.base.expanduser().absolute()),
            "r": self.rank,
            "lora_alpha": alpha,
            "target_modules": list(self.targets),
            "modules_to_save": list(self.heads) or None,
            "bias": "none",
            "lora_dropout": 0.0,
            "fan_in_fan_out": False,
            "use_rslora": False,
            "use_dora": False,
            "rank_pattern": {},
            "alpha_pattern": {},
            "inference_mode": True,
        }
        (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
        if self.digest is not None:
            (folder / BASE).write_text(json.dumps({DIGEST: self.digest}) + "\n")


@torch.no_grad()
def export_adapter(tensors: ScatteredTensors, settings: PeftSettings, target: Path) -> None:
    """Write the folder in place of `target`; every rank must call. Rank 0 gathers all tensors."""
    file = ExportFile(WEIGHTS, tensors.holders, writer=0)
    write_files(target, [file], tensors.gather, settings.write, dist.get_rank(), dist.barrier)


def write_adapter(names: list[str], read: Callable[[str], Tensor], settings: PeftSettings, target: Path) -> None:
    """Write the folder in place of `target` from one process. read: returns a tensor by its name in PEFT's file."""
    file = ExportFile(WEIGHTS, dict.fromkeys(names, (0,)), writer=0)
    write_files(target, [file], lambda _: {name: read(name) for name in names}, settings.write)
