"""Read a rank's shard straight from a Hugging Face folder: each tensor is sliced on disk, never loaded whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors import safe_open

from megatron_rl.errors import ConfigError
from megatron_rl.model.families import ParamSpec, padded_vocab_size

LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.")


class HFFolder:
    """The safetensors of one Hugging Face folder, found by tensor name. Raises ConfigError when there are none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        index = path / "model.safetensors.index.json"
        if index.exists():
            self.files = json.loads(index.read_text())["weight_map"]
        else:
            self.files = {
                name: file.name for file in sorted(path.glob("*.safetensors")) for name in safe_open(file, "pt").keys()
            }
        if not self.files:
            raise ConfigError(f"no *.safetensors in {path}; expected a Hugging Face model folder")
        absent = sorted({file for file in self.files.values() if not (path / file).is_file()})
        if absent:
            raise ConfigError(f"{index} names files that are not there: {', '.join(absent)}")

    def read_slice(self, name: str, dim: int | None, tp_rank: int, tp_size: int, num_rows: int | None) -> torch.Tensor:
        """This TP rank's 1/tp_size of one tensor along `dim` (None: all of it).

        num_rows: length of dim 0 to pad with zeros to before slicing, for vocabularies; None for no padding.
        """
        if name not in self.files:
            raise ConfigError(f"tensor {name!r} is not in {self.path}")
        with safe_open(self.path / self.files[name], "pt") as file:
            source = file.get_slice(name)
            if dim is None:
                return source[:]
            real = source.get_shape()[dim]
            total = real if num_rows is None else num_rows
            start, stop = total * tp_rank // tp_size, total * (tp_rank + 1) // tp_size
            if dim == 1:
                return source[:, start:stop]
            rows = source[min(start, real) : min(stop, real)]
        missing = stop - start - rows.shape[0]
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def read_shard(folder: HFFolder, spec: ParamSpec, vocab_size: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    """The TP shard of one Megatron parameter, in the dtype on disk."""
    num_rows = padded_vocab_size(vocab_size) if spec.padded_vocab else None
    parts = [folder.read_slice(name, spec.tp_dim, tp_rank, tp_size, num_rows) for name in spec.hf_names]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def global_name(name: str, first_layer: int) -> str:
    """A stage's parameter name with its layer counted over the whole model; `first_layer` is the stage's first."""
    return LAYER_NAME.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)


@torch.no_grad()
def load_hf_weights(
    named_parameters: dict[str, torch.nn.Parameter],
    specs: dict[str, ParamSpec],
    folder: HFFolder,
    vocab_size: int,
    tp_rank: int,
    tp_size: int,
) -> None:
    """Copy this rank's shard of each parameter (global Megatron names) from the folder, one tensor at a time.

    Raises ConfigError when a tensor is missing or has another shape than the model's configuration says.
    """
    for name, parameter in named_parameters.items():
        shard = read_shard(folder, specs[name], vocab_size, tp_rank, tp_size)
        if shard.shape != parameter.shape:
            raise ConfigError(
                f"{specs[name].hf_names} in {folder.path} gives a shard of {tuple(shard.shape)} for {name}, "
                f"but config.json implies {tuple(parameter.shape)}"
            )
        parameter.copy_(shard)
