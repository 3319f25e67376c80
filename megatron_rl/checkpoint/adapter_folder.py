"""Adapters as files, and as a part of a model's identity: everything that needs no number of them, and no torch.

A PEFT folder has settings, and a file of tensors with names, types and shapes. Preflight and ranks read it here: a run
starts with a folder that its ranks can read. A checkpoint states its adapters: a run resumes only its own.

Two further forms are read, in which matrices share one A, and B is cut by outputs: Megatron-Bridge's of fused linears,
`linear_qkv.adapter.linear_in.weight`, as whole tensors, and PEFT's of stacked experts, as its `target_parameters` asks.
Legend: r rows of A, E experts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.checkpoint.hf_tensors import hf_tensors
from megatron_rl.checkpoint.identity import WEIGHTS as DIGEST
from megatron_rl.checkpoint.identity import folder_digest, weights_digest
from megatron_rl.checkpoint.weight_files import StoredTensor, read_header, type_faults
from megatron_rl.config.file_kinds import ABSENT, instead_of_file
from megatron_rl.config.json_files import UnreadableFileError, read_json_object
from megatron_rl.config.lora import LINEARS, LoraConfig
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import Model, ParamSpec
from megatron_rl.model.families.adapter_params import EACH, LORA_A, LORA_B, PEFT_PREFIX, peft_targets

if TYPE_CHECKING:
    from torch import Tensor

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
FUSED = re.compile(
    r"decoder\.layers\.\d+\.(self_attention|mlp|mlp\.shared_experts)\.linear_(qkv|proj|fc1|fc2)"
    r"\.adapter\.linear_(in|out)\.weight"
)
BRIDGE = {LORA_A: "linear_in", LORA_B: "linear_out"}
"""Names of Megatron-Bridge: whole tensors, and its words for A and B."""

LORA = "lora"
"""The part's name in an identity; its value is None, or absent, where the whole model is trained."""
REFERENCE_ADAPTER = "adapter of the reference"
"""The name of the digest of `adapter_path` in an identity; None: the reference is without an adapter. Absent where
adapters are compared with no reference, and in checkpoints from before it was written."""
GROUPS = {"actor": "actor_rollout_ref", "critic": "critic"}
"""Trained role -> the group of the configuration that has its `model`."""
TARGETS = "target_modules"


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
    """Contents of adapter_config.json.

    rank, alpha: of all matrices. heads: modules that are trained, and are in the folder, whole: a classifier's score.
    """

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


@dataclass(frozen=True, kw_only=True)
class PeftSettings(AdapterSettings):
    """Settings of a folder that is written.

    base: folder of the model. targets: value of target_modules, as `peft_targets` returns it. digest: digest of the
    base's weights, as `folder_digest` returns it.
    """

    base: Path
    targets: tuple[str, ...]
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
        if fused := not_read(tensors):
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
            modules = list(head_modules(of_heads))
            raise ConfigError(f"{self.path / CONFIG}: modules_to_save={list(self.heads)} must be among {modules}")
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


@dataclass(frozen=True)
class Source:
    """The place of A or B of one matrix in a file: the tensor `name`, of `shape`.

    expert: its number in a tensor of `num_experts`, A [E r, in] or B [out, r E]. rows: of a shared B, run after run;
    None: all.
    """

    name: str
    shape: tuple[int, ...]
    num_experts: int = 1
    expert: int = 0
    rows: tuple[range, ...] | None = None

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the matrix' own part of the tensor."""
        if self.rows is not None:
            own = tensor[list(chain.from_iterable(self.rows))]
            return own.view(len(own), -1, self.num_experts)[:, :, self.expert]
        return tensor.view(self.num_experts, -1, tensor.shape[1])[self.expert]


def adapter_sources(specs: Mapping[str, ParamSpec], names: Iterable[str], rank: int) -> dict[str, Source]:
    """Return where each A and B is in a file with tensors `names` of `rank`, by its name in a PEFT folder.

    specs: of all adapters, in the order of `adapter_specs`. Without a tensor that is shared, it is where it is named.
    """
    present, found = frozenset(names), dict[str, Source]()
    groups: dict[tuple[str, str, int | None], dict[str, ParamSpec]] = {}
    for name, spec in specs.items():
        module, _, matrix = name.partition(".adapters.")
        groups.setdefault((module, matrix.rpartition(".")[2], spec.tensor.tp_dim), {})[name] = spec
    for (module, kind, tp_dim), members in groups.items():
        first, is_a = next(iter(members.values())), kind == LORA_A
        shared, stack = f"{module}.adapter.{BRIDGE[kind]}.weight", 1
        if first.tensor.is_expert:
            shared = _shared_stack(first, kind, (tp_dim is None) == is_a, present)
            stack = first.tensor.segments[0].shape[0]
        rows = {} if is_a or shared not in present else _rows(module, members)
        for tensor in hf_tensors(members):
            out, columns = tensor.shape
            if shared not in present:
                found[tensor.name] = Source(tensor.name, (rank, columns) if is_a else (out, rank))
                continue
            shape = (
                (stack * rank, columns) if is_a else (sum(map(len, chain.from_iterable(rows.values()))), rank * stack)
            )
            found[tensor.name] = Source(shared, shape, stack, tensor.expert or 0, rows.get(tensor.parameter))
    return found


def _shared_stack(spec: ParamSpec, kind: str, by_outputs: bool, present: frozenset[str]) -> str:
    """Return PEFT's tensor of all experts; down's is the outer one of two. Empty: each expert has its own."""
    experts = spec.hf_names[0].partition(EACH)[0].removesuffix(".").replace("block_sparse_moe", "mlp")
    if f"{experts}.base_layer.{LORA_A}.weight" not in present:
        return ""
    return f"{experts}.{'base_layer.' if by_outputs else ''}{kind}.weight"


def _rows(module: str, members: Mapping[str, ParamSpec]) -> dict[str, tuple[range, ...]]:
    """Return the rows of each B in a shared one: one B after the other.

    Megatron has queries, keys and values by groups: the queries that share a key, that key, its value.
    """
    segments = [spec.tensor.segments[0] for spec in members.values()]
    groups = segments[-1].num_units if module.endswith("linear_qkv") else 1
    sizes = [segment.shape[-2] // groups for segment in segments]
    rows, first = dict[str, tuple[range, ...]](), 0
    for name, size in zip(members, sizes, strict=True):
        rows[name] = tuple(range(start, start + size) for start in range(first, groups * sum(sizes), sum(sizes)))
        first += size
    return rows


def not_read(names: Iterable[str]) -> list[str]:
    """Return names of Megatron's linears in a form that is not read, such as one adapter for all experts of a rank."""
    other = (name for name in names if not FUSED.fullmatch(name))
    return sorted(name for name in other if any(f".{linear}." in name for linear in LINEARS))


def adapter_identity(settings: Mapping[str, Any], lora: LoraConfig) -> dict[str, Any]:
    """Return the part of the identity; JSON-ready. settings: of the config.json. Raises ConfigError as `adapted`."""
    if not lora.rank:
        return {LORA: None}
    return {LORA: {"rank": lora.rank, "alpha": lora.alpha, TARGETS: peft_targets(Model.of(settings).specs, lora)}}


def adapter_differences(role: str, saved: Mapping[str, Any] | None, configured: Mapping[str, Any] | None) -> list[str]:
    """Return every reason why a role with the adapters `configured` cannot resume from those that are `saved`.

    Each is a clause with both values, and the key with which it could.
    """
    key = f"{GROUPS.get(role, role)}.model.lora"
    if configured is None:
        if saved is None:
            return []
        rank = saved.get("rank")
        return [
            f"it has only adapters of rank {rank}, and configured is to train the whole {role}: "
            f"to resume, set {key}.rank={rank}"
        ]
    if saved is None:
        return [
            f"it holds the whole {role}, and configured are adapters of rank {configured['rank']}: "
            f"to resume, set {key}.rank=0"
        ]
    return [
        f"{name} of the {role}'s adapters is {_as_typed(saved.get(name))}, and configured is {_as_typed(value)}: "
        f"to resume, set {key}.{name}={_as_typed(saved.get(name))}"
        for name, value in configured.items()
        if saved.get(name) != value
    ]


def reference_identity(lora: LoraConfig) -> dict[str, Any]:
    """Return the part of the identity of a policy that is compared with a reference: each start reads it from
    `adapter_path`, as no checkpoint has it; JSON-ready. Raises ConfigError, and OSError, where it cannot be read.
    """
    if not lora.rank:
        return {}
    path = lora.adapter_path
    return {REFERENCE_ADAPTER: None if path is None else weights_digest(AdapterFiles.open(path).tensors)}


def reference_differences(role: str, saved: Mapping[str, Any], configured: Mapping[str, Any]) -> list[str]:
    """Return why the reference would be another one than before; []: it is the same, or one of both does not say."""
    if REFERENCE_ADAPTER not in saved.keys() & configured.keys():
        return []
    before, now = (_named(identity[REFERENCE_ADAPTER]) for identity in (saved, configured))
    if before == now:
        return []
    key = f"{GROUPS.get(role, role)}.model.lora.adapter_path"
    return [
        f"its reference has {before}, and configured is {now}: to resume, set {key} as it was at the start of the run"
    ]


def _named(digest: str | None) -> str:
    return "no adapter" if digest is None else f"an adapter with the digest {digest}"


def _as_typed(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    if isinstance(value, float):
        return f"{value:g}"
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
