"""What a PEFT folder holds, before a number of it is read: settings, and the names, types and shapes of its tensors.

Preflight and ranks ask the same, so that a run starts with a folder that its ranks can read. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.fused_adapters import Source, adapter_sources, not_read
from megatron_rl.checkpoint.identity import WEIGHTS as DIGEST
from megatron_rl.checkpoint.identity import folder_digest
from megatron_rl.checkpoint.weight_files import StoredTensor, read_header, type_faults
from megatron_rl.config.file_kinds import ABSENT, instead_of_file
from megatron_rl.config.json_files import UnreadableFileError, read_json_object
from megatron_rl.config.lora import LINEARS, LoraConfig
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import ParamSpec
from megatron_rl.model.families.adapter_params import LORA_A, LORA_B, PEFT_PREFIX

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model.json"
"""Next to what PEFT writes: the digest of the base's weights. Folders of others have none."""
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
    """Return a head's spec with the name that PEFT's file has for it."""
    return replace(spec, hf_names=tuple(PEFT_PREFIX + name for name in spec.hf_names))


def head_names(modules: Iterable[str]) -> list[str]:
    """Return the tensors of PEFT's modules_to_save."""
    return [f"{PEFT_PREFIX}{module}.weight" for module in modules]


def head_modules(specs: Mapping[str, ParamSpec]) -> tuple[str, ...]:
    """Return the modules of heads, as PEFT's modules_to_save. specs: as of `head_spec`."""
    names = [name for spec in specs.values() for name in spec.hf_names]
    return tuple(name.removeprefix(PEFT_PREFIX).removesuffix(".weight") for name in names)


def is_adapter(name: str) -> bool:
    """Return whether a Megatron name is that of an A or B."""
    return name.endswith((LORA_A, LORA_B))


@dataclass(frozen=True)
class AdapterSettings:
    """What adapter_config.json says. rank, alpha: of all matrices. heads: modules that the folder has whole."""

    rank: int
    alpha: float
    heads: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> AdapterSettings:
        """Read the file. Raises ConfigError where it cannot be read, and for settings that are not plain LoRA."""
        try:
            settings = read_json_object(folder / CONFIG)
        except UnreadableFileError as error:
            raise ConfigError(f"the adapter in {folder} cannot be read: {error}") from error
        rank, alpha, heads = (settings.get(key) for key in ("r", "lora_alpha", "modules_to_save"))
        for key, value, is_right, meaning in (
            ("r", rank, type(rank) is int and rank >= 1, "a whole number >= 1"),
            ("lora_alpha", alpha, type(alpha) in (int, float) and math.isfinite(alpha or 0), "a finite number"),
            ("modules_to_save", heads, heads is None or _are_names(heads), "a list of names"),
        ):
            if not is_right:
                raise ConfigError(f"{folder / CONFIG}: {key}={value!r:.80} must be {meaning}")
        for key, allowed in PLAIN.items():
            if key in settings and settings[key] not in allowed:
                value = f"{settings[key]!s:.80}"
                raise ConfigError(f"{folder / CONFIG}: {key}={value} must be {allowed[0]}: plain LoRA is read")
        assert rank is not None and alpha is not None
        return cls(rank, float(alpha), tuple(heads or ()))


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter on disk. tensors: of its file, by name."""

    path: Path
    settings: AdapterSettings
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, path: str | Path) -> AdapterFiles:
        """Read settings and header. Raises ConfigError for half a folder, damaged files, what is not plain LoRA, and
        tensors of a type that is none of weights.
        """
        folder = Path(path).expanduser()
        for file in (CONFIG, WEIGHTS):
            if not (folder / file).is_file():
                raise ConfigError(
                    f"{folder} is no PEFT folder: it must have {CONFIG} and {WEIGHTS}, and {file} is missing"
                )
        settings = AdapterSettings.read(folder)
        try:
            tensors = read_header(folder / WEIGHTS)
        except UnreadableFileError as error:
            raise ConfigError(f"the adapter in {folder} cannot be read: {error}") from error
        if faults := type_faults(tensors):
            raise ConfigError(f"the adapter in {folder} cannot be used: {faults[0]}")
        if fused := not_read(tensors, LINEARS):
            raise ConfigError(
                f"{folder / WEIGHTS} has {fused[0]}: of Megatron's linears whole tensors are read, such as "
                "decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight, and none of routed experts; "
                "try: what Megatron-Bridge exports as a PEFT folder"
            )
        return cls(folder, settings, tensors)

    @property
    def names(self) -> frozenset[str]:
        """The names of its tensors."""
        return frozenset(self.tensors)

    @property
    def heads(self) -> tuple[str, ...]:
        """Modules that it has whole. PEFT lists every name that a classifier's head may have."""
        listed = self.settings.heads
        return tuple(module for module in listed if head_names([module])[0] in self.tensors) or listed

    def refuse_other(self, lora: LoraConfig) -> None:
        """Raise ConfigError if the adapters are of another rank or alpha than the configured ones."""
        for name, held, asked in (
            ("rank", self.settings.rank, lora.rank),
            ("alpha", self.settings.alpha, lora.alpha),
        ):
            if held != asked:
                raise ConfigError(
                    f"lora.{name}={asked:g} must be that of lora.adapter_path={self.path}, which is {held:g}; "
                    f"try: lora.{name}={held:g}"
                )

    def refuse_other_base(self, base: Path) -> None:
        """Raise ConfigError if the folder says that its adapters were trained on other weights than those of `base`.

        What cannot be read in the place of that file is refused, too: only a folder without it says nothing.
        """
        if instead_of_file(self.path / BASE) == ABSENT:
            return
        try:
            trained_on, here = read_json_object(self.path / BASE).get(DIGEST), folder_digest(base)
        except (UnreadableFileError, OSError) as error:
            raise ConfigError(f"{self.path / BASE} cannot be read: {error}") from error
        if trained_on != here:
            raise ConfigError(
                f"the adapters of {self.path} were trained on weights with the digest {trained_on!s:.80}, and {base} "
                f"has {here}; try: the folder that they were trained on, or without {BASE} if that is meant"
            )

    def sources(self, specs: Mapping[str, ParamSpec]) -> dict[str, Source]:
        """Return where each A, B and head that the folder has is in its file, by name.

        specs: of all adapters, and of heads that are trained next to them (`head_spec`). Raises ConfigError where the
        folder has other tensors than `specs` name, or one of another shape.
        """
        held = head_names(self.heads)
        of_adapters = {name: spec for name, spec in specs.items() if is_adapter(name)}
        of_heads = {spec.hf_names[0]: spec for name, spec in specs.items() if not is_adapter(name)}
        if not set(held) <= of_heads.keys():
            own = [name.removeprefix(PEFT_PREFIX).removesuffix(".weight") for name in of_heads]
            raise ConfigError(f"{self.path / CONFIG}: modules_to_save={list(self.heads)} must be among {own}")
        found = adapter_sources(of_adapters, self.names, self.settings.rank)
        found |= {name: Source(name, of_heads[name].hf_shape(0)) for name in held}
        wanted = {source.name for source in found.values()}
        if wanted != self.names:
            lacking, further = sorted(wanted - self.names)[:3], sorted(self.names - wanted)[:3]
            raise ConfigError(
                f"{self.path} has other adapters than target_modules asks for: it is missing {lacking or 'none'}, and "
                f"has {further or 'none'} in addition"
            )
        for source in found.values():
            if (shape := self.tensors[source.name].shape) != source.shape:
                raise ConfigError(
                    f"{source.name} in {self.path} is {list(shape)}, the model implies {list(source.shape)}"
                )
        return found
