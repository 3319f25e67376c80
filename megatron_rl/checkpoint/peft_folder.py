"""PEFT's folder of an adapter: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from megatron_rl.checkpoint.fused_adapters import Source, adapter_sources, not_read
from megatron_rl.checkpoint.hf_tensors import hf_tensors, pieces
from megatron_rl.checkpoint.identity import WEIGHTS as DIGEST
from megatron_rl.checkpoint.identity import folder_digest
from megatron_rl.config.lora import LINEARS, LoraConfig
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import ParamSpec
from megatron_rl.model.families.adapter_params import LORA_A, LORA_B, PEFT_PREFIX
from megatron_rl.parallel.sharding import Place

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model.json"
"""Beside what PEFT writes: the digest of the base's weights. Folders of others have none."""
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_bdlora": (None, False),
}
"""Settings that may have these values only, or be absent. Other values of init_lora_weights change the base."""


def head_spec(spec: ParamSpec) -> ParamSpec:
    """A head's spec with the name that PEFT's file has for it."""
    return replace(spec, hf_names=tuple(PEFT_PREFIX + name for name in spec.hf_names))


def head_names(modules: Iterable[str]) -> list[str]:
    """The tensors of PEFT's modules_to_save."""
    return [f"{PEFT_PREFIX}{module}.weight" for module in modules]


def head_modules(specs: Mapping[str, ParamSpec]) -> tuple[str, ...]:
    """The modules of heads, as PEFT's modules_to_save. specs: as of `head_spec`."""
    names = [name for spec in specs.values() for name in spec.hf_names]
    return tuple(name.removeprefix(PEFT_PREFIX).removesuffix(".weight") for name in names)


@dataclass(frozen=True)
class PeftFolder:
    """An adapter on disk. rank, alpha: of all its matrices. names: of its tensors. heads: modules that it has whole."""

    path: Path
    rank: int
    alpha: float
    names: frozenset[str]
    heads: tuple[str, ...] = ()

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
            heads = tuple(map(str, settings.get("modules_to_save") or ()))
            with safe_open(folder / WEIGHTS, "pt") as tensors:
                names = frozenset(tensors.keys())
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, SafetensorError) as error:
            raise ConfigError(f"the adapter in {folder} cannot be read: {type(error).__name__}: {error}") from error
        for key, allowed in PLAIN.items():
            if key in settings and settings[key] not in allowed:
                raise ConfigError(f"{folder / CONFIG}: {key}={settings[key]} must be {allowed[0]}: plain LoRA is read")
        if fused := not_read(names, LINEARS):
            raise ConfigError(
                f"{folder / WEIGHTS} has {fused[0]}: of Megatron's linears whole tensors are read, such as "
                "decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight, and none of routed experts; "
                "nearest: what Megatron-Bridge exports as a PEFT folder"
            )
        # PEFT lists every name that a classifier's head may have.
        present = tuple(module for module in heads if head_names([module])[0] in names)
        return cls(folder, rank, alpha, names, present or heads)

    def refuse_other(self, lora: LoraConfig) -> None:
        """Raise ConfigError if the adapters are of another rank or alpha than the configured ones."""
        for name, held, asked in (("rank", self.rank, lora.rank), ("alpha", self.alpha, lora.alpha)):
            if held != asked:
                raise ConfigError(
                    f"lora.{name}={asked:g} must be that of lora.adapter_path={self.path}, which is {held:g}; "
                    f"nearest: lora.{name}={held:g}"
                )

    def refuse_other_base(self, base: Path) -> None:
        """Raise ConfigError if the folder says that its adapters were trained on other weights than those of `base`."""
        if not (self.path / BASE).is_file():
            return
        try:
            trained_on, here = json.loads((self.path / BASE).read_text())[DIGEST], folder_digest(base)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(f"{self.path / BASE} cannot be read: {type(error).__name__}: {error}") from error
        if trained_on != here:
            raise ConfigError(
                f"the adapters of {self.path} were trained on weights with the digest {trained_on}, and {base} has "
                f"{here}; nearest: the folder that they were trained on, or without {BASE} if that is meant"
            )

    @cached_property
    def _whole(self) -> Callable[[str], torch.Tensor]:
        """A tensor by its name; the last ones are kept, for what is read part by part."""
        file = safe_open(self.path / WEIGHTS, "pt")

        @lru_cache(maxsize=2)
        def read(name: str) -> torch.Tensor:
            tensor: torch.Tensor = file.get_tensor(name)
            if not torch.isfinite(tensor).all():
                raise ConfigError(f"{self.path / WEIGHTS} cannot be used: an element of {name} is NaN or infinite")
            return tensor

        return read

    def read(self, source: Source) -> torch.Tensor:
        """A or B of one matrix. Raises ConfigError if it is missing, misshapen or not finite."""
        if source.name not in self.names:
            raise ConfigError(f"{self.path / WEIGHTS} has no {source.name}")
        tensor = self._whole(source.name)
        if tensor.shape != source.shape:
            raise ConfigError(
                f"{source.name} in {self.path} is {list(tensor.shape)}, the model implies {list(source.shape)}"
            )
        return source.cut(tensor)


@torch.no_grad()
def load_adapters(
    parameters: Mapping[str, torch.Tensor], specs: Mapping[str, ParamSpec], folder: PeftFolder, place: Place
) -> None:
    """Fill this rank's adapters (global names) from a PEFT folder, with zeros beyond the folder's rank, and the heads
    that it has.

    specs: of all adapters, and of heads that are trained beside them. Raises ConfigError where the folder has other
    tensors than `specs` name.
    """
    named = {name: spec if _is_adapter(name) else head_spec(spec) for name, spec in specs.items()}
    held = set(head_names(folder.heads))
    sources = adapter_sources({x: spec for x, spec in named.items() if _is_adapter(x)}, folder.names, folder.rank)
    wanted = {source.name for source in sources.values()} | held
    heads = {spec.hf_names[0] for name, spec in named.items() if not _is_adapter(name)}
    if not held <= heads:
        own = [name.removeprefix(PEFT_PREFIX).removesuffix(".weight") for name in heads]
        raise ConfigError(f"{folder.path / CONFIG}: modules_to_save={list(folder.heads)} must be among {own}")
    if wanted != folder.names:
        lacking, further = sorted(wanted - folder.names)[:3], sorted(folder.names - wanted)[:3]
        raise ConfigError(
            f"{folder.path} has other adapters than target_modules asks for: it lacks {lacking or 'none'}, and has "
            f"{further or 'none'} besides"
        )
    for tensor in hf_tensors({name: named[name] for name in parameters}):
        if not _is_adapter(tensor.parameter) and tensor.name not in held:
            continue
        for piece in pieces(tensor, (0,), {0: place}):  # none for the experts of other ranks
            part = folder.read(sources.get(tensor.name, Source(tensor.name, tensor.shape)))
            rows, columns = (size - given for size, given in zip(tensor.shape, part.shape, strict=True))
            whole = F.pad(part, (0, columns, 0, rows))
            parameters[tensor.parameter][piece.source].copy_(whole[piece.target])


def _is_adapter(name: str) -> bool:
    return name.endswith((LORA_A, LORA_B))
