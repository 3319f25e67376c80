"""Carried tensors: those of a Hugging Face folder that a run neither reads nor trains, and that exports write again.

They are copied byte for byte, in their own dtype. A checkpoint keeps only their names and a digest: an export of it
reads them from the folder that the run started from. A reward model has none, as its class could not hold them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_rl.checkpoint.identity import weights_digest
from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.checkpoint.weight_files import StoredTensor, read_weight_files, some_of
from megatron_rl.config.json_files import UnreadableFileError, read_json_object
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import family_of
from megatron_rl.observe.liveness import made_progress

FILE = "carried.json"
"""The file next to a checkpoint's config.json that names the pass-through tensors and their folder."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By safetensors' names."""


@dataclass(frozen=True)
class PassThroughTensors:
    """The pass-through tensors of one folder, by name; none of them is in memory."""

    stored: Mapping[str, StoredTensor] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> PassThroughTensors:
        """Find them by the folder's config.json and the headers of its weights.

        Raises ConfigError if these cannot be read, or if a tensor is of a type that torch does not have.
        """
        try:
            settings = ModelFolder(folder).settings
            named = family_of(settings["architectures"]).carried
            if not named.can_be:
                return cls()
            tensors, faults = read_weight_files(folder)
        except (UnreadableFileError, OSError) as error:
            raise ConfigError(f"the pass-through tensors of {folder} cannot be read: {error}") from error
        carried = {name: tensor for name, tensor in tensors.items() if named.has(name, settings)}
        faults += [
            f"{name} in {tensor.file.name} is of type {tensor.dtype}, which is none of {', '.join(DTYPES)}"
            for name, tensor in carried.items()
            if tensor.dtype not in DTYPES
        ]
        if faults:
            raise ConfigError(f"the pass-through tensors of {folder} cannot be read: {faults[0]}")
        return cls(carried)

    def without(self, names: Container[str]) -> PassThroughTensors:
        """Return the pass-through tensors without those of `names`, which an export writes as they were trained."""
        return PassThroughTensors({name: tensor for name, tensor in self.stored.items() if name not in names})

    @property
    def sizes(self) -> dict[str, int]:
        """Tensor -> bytes."""
        return {name: tensor.stop - tensor.start for name, tensor in self.stored.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor -> shape."""
        return {name: tensor.shape for name, tensor in self.stored.items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Tensor -> dtype."""
        return {name: DTYPES[tensor.dtype] for name, tensor in self.stored.items()}

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor to the CPU. Raises ConfigError if its file has gone."""
        tensor = self.stored[name]
        made_progress()
        data = bytearray(tensor.stop - tensor.start)
        try:
            with tensor.file.open("rb") as file:
                file.seek(tensor.start)
                num_read = file.readinto(data)
        except OSError as error:
            raise ConfigError(
                f"the pass-through tensor {name} cannot be read from {tensor.file}: {error.strerror}"
            ) from error
        if num_read != len(data):
            raise ConfigError(f"the pass-through tensor {name} cannot be read from {tensor.file}: it was cut off")
        dtype = DTYPES[tensor.dtype]
        if not math.prod(tensor.shape):
            return torch.empty(tensor.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).view(tensor.shape)


def keep_carried(source: Path, target: Path) -> str | None:
    """Write which tensors a folder carries to `target`; returns the file's name, None if there are none.

    Raises ConfigError as `PassThroughTensors.of`, OSError.
    """
    stored = PassThroughTensors.of(source).stored
    if not stored:
        return None
    content = {"folder": str(source.expanduser().absolute()), "tensors": [*stored], "digest": weights_digest(stored)}
    (target / FILE).write_text(json.dumps(content, indent=1) + "\n")
    return FILE


def kept_carried(kept: Path, base: Path | None = None) -> PassThroughTensors:
    """Find the pass-through tensors that `keep_carried` has named in `kept`; none if there is no such file.

    base: the folder to read them from; None: the one that the run started from. Raises ConfigError if they are not
    there as they were.
    """
    if not (kept / FILE).exists():
        return PassThroughTensors()
    try:
        content = read_json_object(kept / FILE)
    except UnreadableFileError as error:
        raise ConfigError(f"{kept} cannot be read: {error}") from error
    folder, names = (base or Path(content["folder"])).expanduser(), content["tensors"]
    need = f"an export writes {some_of(names)} again from the folder that the run started from"
    way_out = "export --base FOLDER names it"
    try:
        carried = PassThroughTensors.of(folder)
        digest = weights_digest(carried.stored)
    except (ConfigError, OSError) as error:
        raise ConfigError(f"{need}, and that is missing: {error}; {way_out}") from error
    if digest != content["digest"]:
        raise ConfigError(f"{need}, and {folder} does not hold them as they were; {way_out}")
    return carried
