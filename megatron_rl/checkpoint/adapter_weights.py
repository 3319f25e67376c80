"""The numbers of adapters: read from a PEFT folder, written to one, merged into their base.

W + scale B A is computed in float32 and rounded once, one matrix at a time. Legend: r rows of A, E experts of a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.checkpoint.adapter_folder import (
    GROUPS,
    LORA,
    TARGETS,
    WEIGHTS,
    AdapterFiles,
    PeftSettings,
    Source,
    head_spec,
    is_adapter,
)
from megatron_rl.checkpoint.contents import RUN_FILE
from megatron_rl.checkpoint.hf_export import ScatteredTensors
from megatron_rl.checkpoint.hf_folder import ExportFile, write_files
from megatron_rl.checkpoint.hf_import import HFFolder
from megatron_rl.checkpoint.hf_tensors import HFTensor, hf_tensors, pieces
from megatron_rl.checkpoint.identity import WEIGHTS as DIGEST
from megatron_rl.checkpoint.identity import compared, folder_identity
from megatron_rl.checkpoint.manifest import ManifestError, model_identity, read_manifest
from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.checkpoint.run_file import read_run_file
from megatron_rl.checkpoint.saved_tensors import SavedTensors, checkpoint_key
from megatron_rl.config.json_files import UnreadableFileError
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import ParamSpec
from megatron_rl.model.families.adapter_params import LORA_A, LORA_B, PEFT_PREFIX, merged_rows, module_name
from megatron_rl.parallel.sharding import Part, Place, shard_of


@torch.no_grad()
def load_adapters(
    parameters: Mapping[str, torch.Tensor], specs: Mapping[str, ParamSpec], folder: AdapterFiles, place: Place
) -> None:
    """Fill this rank's adapters (global names) from a PEFT folder, with zeros beyond the folder's rank, and the heads
    that it has.

    specs: of all adapters, and of heads that are trained next to them. Raises ConfigError as `AdapterFiles.sources`,
    and for an element that is NaN, infinite or beyond the range of the parameter's dtype.
    """
    named = {name: spec if is_adapter(name) else head_spec(spec) for name, spec in specs.items()}
    sources, read = folder.sources(named), _reader(folder)
    for tensor in hf_tensors({name: named[name] for name in parameters}):
        if tensor.name not in sources:
            continue  # a head that the folder does not have
        source, parameter = sources[tensor.name], parameters[tensor.parameter]
        for piece in pieces(tensor, (0,), {0: place}):  # none for the experts of other ranks
            part = source.cut(read(source, parameter.dtype))
            rows, columns = (size - given for size, given in zip(tensor.shape, part.shape, strict=True))
            whole = F.pad(part, (0, columns, 0, rows))
            parameter[piece.source].copy_(whole[piece.target])


def _reader(folder: AdapterFiles) -> Callable[[Source, torch.dtype], torch.Tensor]:
    """Return a function that reads a whole tensor of the folder; it keeps the last two, which are read part by part."""
    file = HFFolder(folder.path, dict.fromkeys(folder.names, WEIGHTS))

    @lru_cache(maxsize=2)
    def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        file.copy_box(name, tuple((0, size) for size in shape), shape, tensor)
        return tensor

    return lambda source, dtype: whole(source.name, source.shape, dtype)


@torch.no_grad()
def export_adapter(tensors: ScatteredTensors, settings: PeftSettings, target: Path) -> None:
    """Write the folder in place of `target`; every rank must call. Rank 0 gathers all tensors."""
    file = ExportFile(WEIGHTS, tensors.holders, writer=0)
    write_files(target, [file], tensors.gather, settings.write, dist.get_rank(), dist.barrier)


def write_adapter(names: list[str], read: Callable[[str], Tensor], settings: PeftSettings, target: Path) -> None:
    """Write the folder in place of `target` from one process. read: returns a tensor by its name in PEFT's file."""
    file = ExportFile(WEIGHTS, dict.fromkeys(names, (0,)), writer=0)
    write_files(target, [file], lambda _: {name: read(name) for name in names}, settings.write)


Rows = tuple[slice, ...]
"""The place of a product in a weight."""


def merged(
    weight: Tensor, products: Iterable[tuple[Rows, Tensor, Tensor]], scale: float, out: Tensor | None = None
) -> Tensor:
    """Return `weight` [out, in] with each product of B [o, r] and A [r, i] added at its place, [o, i] large.

    `weight` is not written. All may be stacks [E, ...], of which one matrix at a time is in float32. out: the tensor
    that is filled and returned; None: a new one.
    """
    out = torch.empty_like(weight) if out is None else out
    if weight.dim() == 3:
        products = list(products)
        for expert, matrix in enumerate(weight):
            own = [(rows[1:], lora_a[expert], lora_b[expert]) for rows, lora_a, lora_b in products]
            merged(matrix, own, scale, out[expert])
        return out
    whole = weight.detach().to(torch.float32, copy=True)
    for rows, lora_a, lora_b in products:
        whole[rows].addmm_(lora_b.detach().float(), lora_a.detach().float(), alpha=scale)
    return out.copy_(whole)


def _rows(parts: Sequence[Part], numbers: Sequence[int]) -> Rows:
    """Return the place of adjacent segments in a rank's weight."""
    first, last = parts[numbers[0]].index, parts[numbers[-1]].index
    return *first[:-2], slice(first[-2].start, last[-2].stop), first[-1]


class MergedParameters:
    """A rank's parameters as the merged model has them. Call it with the name of one; the last one is kept.

    An adapter is cut as its linear is: of a linear cut by outputs B is cut and A is whole, so B A is the rank's rows of
    the product; of one cut by inputs A is cut, so it is the rank's columns. No rank needs another's.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        specs: Mapping[str, ParamSpec],
        adapters: Iterable[str],
        place: Place,
        scale: float,
    ) -> None:
        """Take a rank's tensors. parameters: global Megatron name -> tensor, adapters too. specs: of the model.
        adapters: names of all A and B.
        """
        self.parameters, self.specs, self.place, self.scale = parameters, specs, place, scale
        self.pairs = merged_rows(specs, adapters)
        self._last: tuple[str, Tensor] | None = None

    def __call__(self, name: str) -> Tensor:
        """Return the parameter itself, or if it has adapters the merged one."""
        if name not in self.pairs:
            return self.parameters[name].detach()
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made
            self._last = (name, self.write(name))
        return self._last[1]

    def write(self, name: str, out: Tensor | None = None) -> Tensor:
        """Merge one that has adapters into `out`, or into a new tensor."""
        parts = shard_of(self.specs[name].tensor, self.place).parts
        products = [
            (_rows(parts, numbers), self.parameters[name_a], self.parameters[name_b])
            for numbers, (name_a, name_b) in self.pairs[name].items()
        ]
        return merged(self.parameters[name].detach(), products, self.scale, out)


def holds_adapters(saved: SavedTensors) -> bool:
    """Return whether a role was saved as adapters instead of its whole model."""
    return any(name.startswith(PEFT_PREFIX) for name in saved.weights)


@dataclass(frozen=True)
class SavedAdapters:
    """The adapters that a checkpoint has of one role: written as PEFT's folder, or merged into their base; one process.

    saved: the role's tensors. identity: the role's, from the manifest. base: the folder of its base.
    """

    saved: SavedTensors
    identity: Mapping[str, Any]
    base: Path

    @classmethod
    def open(cls, checkpoint: Path, role: str, base: Path | None = None) -> SavedAdapters:
        """Open the adapters of a role. base: None: the folder that the run started from.

        Raises ConfigError if the role has no adapters.
        """
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
            base = ModelFolder(self.base)
            present = model_identity(base.settings)
            present |= folder_identity(base) if present.items() <= self.identity.items() else {}
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
        """Return a tensor of the merged model, in the dtype of training."""
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

        targets, digest = tuple(lora[TARGETS]), self.identity.get(DIGEST)
        settings = PeftSettings(
            rank, float(lora["alpha"]), tuple(heads), base=self.base, targets=targets, digest=digest
        )
        write_adapter(list(places), read, settings, target)


def expert_name(name: str, expert: int) -> str:
    """Return the name of one expert's A or B in PEFT's file, from that of the stack in a checkpoint."""
    parent, own, kind, weight = name.rsplit(".", 3)
    return f"{parent}.{expert}.{own}.{kind}.{weight}"
