"""Read a rank's shard straight from a Hugging Face folder, in small pieces of memory-mapped files.

No tensor is ever in memory whole unless the rank holds it whole, and then only in its final place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_rl.checkpoint.mxfp4 import GROUP, unpacked
from megatron_rl.checkpoint.weight_files import stored_names, weight_files
from megatron_rl.config.file_kinds import instead_of_file
from megatron_rl.config.json_files import UnreadableFileError
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import ParamSpec, is_one_by_one
from megatron_rl.observe.liveness import made_progress
from megatron_rl.parallel.sharding import Box, Place, box_index, box_shape, shard_of

MAX_MAPPED_ELEMENTS = 16 << 20
"""Elements that are read before files are closed and mapped again: pages count as this process's while mapped."""

LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.")


class HFFolder:
    """The safetensors of one Hugging Face folder, found by tensor name.

    files: the file of each tensor; None: those of a model (`weight_files`). Raises ConfigError if there are none, if
    one is damaged, or if two sets of weights are possible.
    """

    def __init__(self, path: Path, files: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.files = _files_of(path) if files is None else files
        self.handles: dict[str, safe_open] = {}
        self.num_mapped = 0

    def copy_box(self, name: str, box: Box, whole_shape: tuple[int, ...], into: torch.Tensor) -> None:
        """Copy the elements of `box` of one tensor, cast to the dtype of `into`; nothing else is read.

        Raises ConfigError when there is no such tensor, its shape is not `whole_shape`, or a copied element is NaN,
        infinite or beyond the range of the dtype.
        """
        if name not in self.files:
            raise ConfigError(f"tensor {name!r} is not in {self.path}")
        shape = tuple(self._slice(name).get_shape())
        if shape != whole_shape:
            raise ConfigError(f"{name} in {self.path} has shape {shape}, but config.json implies {whole_shape}")
        # A cut along a later dim touches the pages of whole rows.
        row = math.prod(shape[1:])
        (start, stop), rest = box[0], box_index(box[1:])
        num_rows = max(1, MAX_MAPPED_ELEMENTS // row)
        for first in range(start, stop, num_rows):
            last = min(first + num_rows, stop)
            read, copied = self._slice(name)[(slice(first, last), *rest)], into[first - start : last - start]
            copied.copy_(read)
            if copied.is_floating_point() and not is_finite(copied):
                what = f"is too large for {into.dtype}" if is_finite(read) else "is NaN or infinite"
                raise ConfigError(f"{self.path / self.files[name]} cannot be used: an element of {name} {what}")
            made_progress()
            self._account((last - first) * row)

    def has_codes(self, name: str) -> bool:
        """Whether a tensor is there as codes of 4 bits (`mxfp4.py`)."""
        return name not in self.files and stored_names(name)[0] in self.files

    def copy_codes(self, name: str, box: Box, whole_shape: tuple[int, ...], into: torch.Tensor) -> None:
        """Copy the elements of `box` of a stack of matrices [E, rows, columns] that exists as codes.

        Raises ConfigError as `copy_box`.
        """
        *stack, columns = whole_shape
        if columns % GROUP:
            raise ConfigError(
                f"{name} in {self.path} has codes of 4 bits in rows of {columns}, which must be a multiple of {GROUP}"
            )
        (first, stop), groups = box[-1], columns // GROUP
        whole_groups = first // GROUP, -(-stop // GROUP)
        own = slice(first - whole_groups[0] * GROUP, stop - whole_groups[0] * GROUP)
        shapes = ((*stack, groups, GROUP // 2), (*stack, groups))
        num_rows = max(1, MAX_MAPPED_ELEMENTS // columns)
        for number, expert in enumerate(range(*box[0])):
            for start in range(box[1][0], box[1][1], num_rows):
                last = min(start + num_rows, box[1][1])
                piece: Box = ((expert, expert + 1), (start, last), whole_groups)
                parts = []
                for stored, shape in zip(stored_names(name), shapes, strict=True):
                    rest = ((0, GROUP // 2),) if len(shape) > len(piece) else ()
                    sizes = box_shape((*piece, *rest))
                    parts.append(torch.empty(sizes, dtype=torch.uint8))
                    self.copy_box(stored, (*piece, *rest), shape, parts[-1])
                copied = into[number, start - box[1][0] : last - box[1][0]]
                copied.copy_(unpacked(*parts)[0, :, own])
                if not is_finite(copied):
                    raise ConfigError(f"{name} of {self.path} cannot be used: a number is infinite in {into.dtype}")

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of one tensor. Raises ConfigError if there is no tensor of that name."""
        if name not in self.files:
            raise ConfigError(f"tensor {name!r} is not in {self.path}")
        first: torch.Tensor = self._slice(name)[:1]
        return first.dtype

    def _slice(self, name: str) -> Any:
        """A slice object of the tensor; nothing is read yet."""
        file = self.files[name]
        if file not in self.handles:
            # Kept open, because opening one parses a header that lists every tensor in it.
            self.handles[file] = _opened(self.path / file)
        try:
            return self.handles[file].get_slice(name)
        except SafetensorError as error:
            raise ConfigError(f"{self.path / file} cannot be used: {error}") from error

    def _account(self, num_elements: int) -> None:
        self.num_mapped += num_elements
        if self.num_mapped >= MAX_MAPPED_ELEMENTS:
            self.handles.clear()
            self.num_mapped = 0


def _opened(file: Path) -> Any:
    """An open file of safetensors. Raises ConfigError for a damaged file, and for a pipe, which would not open."""
    lacks = instead_of_file(file)
    if lacks is None:
        try:
            return safe_open(file, "pt")
        except (SafetensorError, OSError) as error:
            lacks = f"it cannot be read: {error}"
    raise ConfigError(f"{file} must be a whole file of safetensors, and {lacks}")


def _files_of(path: Path) -> Mapping[str, str]:
    try:
        named = weight_files(path)
    except UnreadableFileError as error:
        raise ConfigError(f"the weights of {path} cannot be read: {error}") from error
    files = named.index or {name: file for file in named.files for name in _opened(path / file).keys()}
    if not files:
        raise ConfigError(f"no *.safetensors in {path}; expected a Hugging Face model folder")
    return files


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite; in one pass, and without a tensor of responses. It may be empty."""
    if not tensor.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())  # both are NaN where an element is


def global_name(name: str, first_layer: int) -> str:
    """A stage's parameter name with its layer counted over the whole model; `first_layer` is the stage's first."""
    return LAYER_NAME.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)


@torch.no_grad()
def load_hf_weights(
    named_parameters: Mapping[str, torch.Tensor], specs: dict[str, ParamSpec], folder: HFFolder, place: Place
) -> None:
    """Fill this rank's parameters (global Megatron names) from the folder, one piece of a tensor at a time.

    Rows that only pad a vocabulary become 0. Raises ConfigError when a tensor is missing or has another shape than
    the model's configuration says.
    """
    for name, parameter in named_parameters.items():
        spec = specs[name]
        shard = shard_of(spec.tensor, place)
        if shard.shape != parameter.shape:
            raise RuntimeError(f"{name}: Megatron made {tuple(parameter.shape)}, and the layout has {shard.shape}")
        if shard.is_padded:
            parameter.zero_()
        for part in shard.parts:
            read_part(folder, spec, part.segment, part.box, into=parameter[part.index])


def read_part(folder: HFFolder, spec: ParamSpec, segment: int, box: Box, into: torch.Tensor) -> None:
    """Copy `box` of one segment from the folder; of experts that it has one by one, one after the other."""
    name, shape = spec.hf_names[segment], spec.hf_shape(segment)
    box = spec.in_hf(segment, box)
    if folder.has_codes(name):
        folder.copy_codes(name, box, shape, into)
        return
    if spec.transposed:
        swapped = ((*box[:-2], box[-1], box[-2]), (*shape[:-2], shape[-1], shape[-2]))
        folder.copy_box(name, *swapped, into.transpose(-1, -2))
        return
    if not is_one_by_one(spec):
        folder.copy_box(name, box, shape, into)
        return
    for row, expert in enumerate(range(*box[0])):
        folder.copy_box(name.format(expert=expert), box[1:], shape[1:], into[row])
