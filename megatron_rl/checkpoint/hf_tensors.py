"""Map each tensor of a Hugging Face folder to parts of the ranks' shards: pure arithmetic. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rl.model.families import ParamSpec, is_one_by_one
from megatron_rl.parallel.sharding import Place, box_index, shard_of

if TYPE_CHECKING:
    from torch import Tensor

Index = tuple[int | slice, ...]
"""An index of a tensor."""


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a Hugging Face folder: a segment of a Megatron parameter, several, or one expert of one.

    parameter: the Megatron name, layers counted over the whole model. segment: the first. expert: None if segments are
    the tensor.
    """

    name: str
    parameter: str
    spec: ParamSpec
    segment: int
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, without padding."""
        shape = self.spec.hf_shape(self.segment)
        shape = shape if self.expert is None else shape[1:]
        return (*shape[:-2], shape[-1], shape[-2]) if self.spec.transposed else shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def as_in_folder(self, data: Tensor) -> Tensor:
        """Elements of it, or of a part, in the order of the folder's dims; given in that of the parameter's."""
        return data.transpose(-1, -2) if self.spec.transposed else data


@dataclass(frozen=True)
class TensorPiece:
    """One rank's contribution to a whole tensor: `source` of its shard goes to `target` of the tensor.

    The dims of `source` are the parameter's, those of `target` the folder's (`HFTensor.as_in_folder`).
    """

    rank: int
    source: Index
    target: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.target)


def hf_tensors(specs: Mapping[str, ParamSpec]) -> list[HFTensor]:
    """Every tensor of the folder once, in the order of `specs`; of copies (a tied head) the first."""
    tensors: dict[str, HFTensor] = {}
    for parameter, spec in specs.items():
        for segment, name in enumerate(spec.hf_names):
            if not is_one_by_one(spec):
                tensors.setdefault(name, HFTensor(name, parameter, spec, segment))
                continue
            for expert in range(spec.tensor.segments[segment].shape[0]):
                single = name.format(expert=expert)
                tensors.setdefault(single, HFTensor(single, parameter, spec, segment, expert))
    return list(tensors.values())


def pieces(tensor: HFTensor, holders: Iterable[int], places: dict[int, Place]) -> list[TensorPiece]:
    """The pieces that make up `tensor`, each from the first of `holders` (ranks that have a shard) that has it."""
    by_box: dict[tuple[Any, ...], TensorPiece] = {}
    for rank in holders:
        for part in shard_of(tensor.spec.tensor, places[rank]).parts:
            if part.segment not in tensor.spec.sections(tensor.segment):
                continue
            box: tuple[Any, ...] = tensor.spec.in_hf(part.segment, part.box)
            source: tuple[Any, ...] = part.index
            if tensor.expert is not None:
                (first, stop), box = box[0], box[1:]
                if not first <= tensor.expert < stop:
                    continue
                source = (part.at[0] + tensor.expert - first, *source[1:])
            if tensor.spec.transposed:
                box = (*box[:-2], box[-1], box[-2])
            by_box.setdefault(box, TensorPiece(rank, source, box_index(box)))
    return list(by_box.values())


def put_together(tensor: HFTensor, parts: Iterable[tuple[TensorPiece, Tensor]]) -> Tensor:
    """The whole tensor from its pieces and their elements, on the CPU; rows that only pad a vocabulary are in none.

    Raises ValueError when the pieces do not cover the tensor.
    """
    covered, whole = 0, None
    for piece, data in parts:
        if whole is None:
            whole = data.new_empty(tensor.shape, device="cpu")
        whole[piece.target] = data
        covered += data.numel()
    if whole is None or covered != tensor.numel:
        raise ValueError(f"{tensor.name}: ranks hold {covered} of its {tensor.numel} elements")
    return whole
