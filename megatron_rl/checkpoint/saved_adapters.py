"""The adapters of a saved role: as PEFT's folder, or merged into the base that they were trained on. One process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.adapter_identity import GROUPS, LORA, TARGETS
from megatron_rl.checkpoint.contents import RUN_FILE
from megatron_rl.checkpoint.hf_import import HFFolder
from megatron_rl.checkpoint.hf_tensors import HFTensor
from megatron_rl.checkpoint.identity import WEIGHTS, compared, folder_identity
from megatron_rl.checkpoint.manifest import ManifestError, model_identity, read_manifest
from megatron_rl.checkpoint.merged_weights import merged
from megatron_rl.checkpoint.peft_export import PeftSettings, write_adapter
from megatron_rl.checkpoint.run_file import read_run_file
from megatron_rl.checkpoint.saved_tensors import SavedTensors, checkpoint_key
from megatron_rl.config.json_files import UnreadableFileError, read_json_object
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import text_settings
from megatron_rl.model.families.adapter_params import LORA_A, LORA_B, PEFT_PREFIX, module_name


def holds_adapters(saved: SavedTensors) -> bool:
    """Whether a role was saved as adapters instead of its whole model."""
    return any(name.startswith(PEFT_PREFIX) for name in saved.weights)


@dataclass(frozen=True)
class SavedAdapters:
    """saved: of one role of a checkpoint. identity: the role's, from the manifest. base: the folder of its base."""

    saved: SavedTensors
    identity: Mapping[str, Any]
    base: Path

    @classmethod
    def open(cls, checkpoint: Path, role: str, base: Path | None = None) -> SavedAdapters:
        """base: None: the folder that the run started from. Raises ConfigError if the role has no adapters."""
        saved = SavedTensors(checkpoint / role)
        if not holds_adapters(saved):
            raise ConfigError(
                f"{checkpoint} holds the whole {role}, no adapters; try: export without --adapter and --base"
            )
        try:
            identity = read_manifest(checkpoint).models[role]
        except (ManifestError, KeyError) as error:
            raise ConfigError(f"{checkpoint} does not contain which adapters it has: {error}") from error
        if not isinstance(identity.get(LORA), dict):
            raise ConfigError(f"{checkpoint} holds adapters, and its manifest does not contain their rank and alpha")
        if base is None:
            base = Path(read_run_file(checkpoint / RUN_FILE)["config"][GROUPS[role]]["model"]["path"])
        return cls(saved, identity, base.expanduser())

    @property
    def scale(self) -> float:
        """The factor of B A."""
        lora = self.identity[LORA]
        return float(lora["alpha"]) / int(lora["rank"])

    @cached_property
    def folder(self) -> HFFolder:
        """The base's weights. Raises ConfigError if they do not exist, or another model's."""
        way_out = "export --base FOLDER names the folder that it was trained from"
        try:
            settings = text_settings(read_json_object(self.base / "config.json"))
            present = model_identity(settings)
            present |= folder_identity(self.base, settings) if present.items() <= self.identity.items() else {}
        except (UnreadableFileError, OSError) as error:
            raise ConfigError(f"the base of the adapters, {self.base}, cannot be read: {error}; {way_out}") from error
        for name, value in compared(present, self.identity).items():
            if self.identity.get(name) != value:
                raise ConfigError(
                    f"{self.base} is another model than the base of the adapters: {name} is {value}, and was "
                    f"{self.identity.get(name)}; {way_out}"
                )
        return HFFolder(self.base)

    def merged(self, tensor: HFTensor) -> torch.Tensor:
        """A tensor of the merged model, in the dtype of training."""
        key = checkpoint_key(tensor.spec, tensor.segment)
        if key in self.saved.weights:  # a head, which is trained whole
            return tensor.as_in_folder(self.saved.kept(key))
        names = [f"{PEFT_PREFIX}{module_name(key, tensor.spec)}.{kind}.weight" for kind in (LORA_A, LORA_B)]
        weight = torch.empty(tensor.shape, dtype=self.saved.dtype(self.saved.weights[0]))
        if self.folder.has_codes(tensor.name):
            shape = tensor.spec.tensor.segments[tensor.segment].shape
            everything = tuple((0, size) for size in shape)
            self.folder.copy_codes(tensor.name, everything, shape, tensor.as_in_folder(weight))
            return weight
        self.folder.copy_box(tensor.name, tuple((0, size) for size in tensor.shape), tensor.shape, weight)
        if names[0] not in self.saved.weights:
            return weight
        pair = [self.saved.kept(name) for name in names]
        lora_a, lora_b = pair if tensor.expert is None else [part[tensor.expert] for part in pair]
        return merged(weight, [((slice(None),), lora_a, lora_b)], self.scale)

    def write(self, target: Path) -> None:
        """Write PEFT's folder in place of `target`. The base is named, and not read. Raises OSError."""
        lora = self.identity[LORA]
        rank = int(lora["rank"])
        heads = [name.removesuffix(".weight") for name in self.saved.weights if not name.startswith(PEFT_PREFIX)]
        places = dict[str, tuple[str, int | None]]()
        for key in self.saved.weights:
            name = key if key.startswith(PEFT_PREFIX) else PEFT_PREFIX + key
            stack = self.saved.shape(key)[:-2]
            places |= {expert_name(name, each): (key, each) for each in range(*stack)} if stack else {name: (key, None)}

        def read(name: str) -> torch.Tensor:
            key, expert = places[name]
            tensor = self.saved.kept(key) if expert is None else self.saved.kept(key)[expert]
            if name.endswith(f".{LORA_A}.weight"):
                return tensor[:rank]
            return tensor[:, :rank] if name.endswith(f".{LORA_B}.weight") else tensor

        targets, digest = tuple(lora[TARGETS]), self.identity.get(WEIGHTS)
        settings = PeftSettings(self.base, rank, float(lora["alpha"]), targets, tuple(heads), digest)
        write_adapter(list(places), read, settings, target)


def expert_name(name: str, expert: int) -> str:
    """The name of one expert's A or B in PEFT's file, from that of the stack in a checkpoint."""
    parent, own, kind, weight = name.rsplit(".", 3)
    return f"{parent}.{expert}.{own}.{kind}.{weight}"
