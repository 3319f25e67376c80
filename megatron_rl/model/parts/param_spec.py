"""One parameter of Megatron: the logical tensor that it is a shard of, and its names in a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.parallel.sharding import Box, LogicalTensor, Segment

CORRECTION = "correction_bias"
"""The router's name of the bias that is added to scores for the choice of experts alone."""


@dataclass(frozen=True)
class Constant:
    """A tensor of the folder that no update changes. vLLM has it under the same name, in float32."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ParamSpec:
    """One Megatron parameter: the logical tensor it is a shard of, and the Hugging Face tensor of each segment.

    Two Megatron parameters with the same tensor (a tied head on the last pipeline stage) are copies. The names of an
    expert tensor contain `{expert}` for the expert's number; each expert is one slice along dim 0. Without it the
    folder has all experts in one tensor. Segments with one name are sections of one tensor, stacked there along dim 0
    as here, and where it has all experts along dim 1.
    transposed: the folder's tensor has the last two dims in the other order. Such a tensor may also be there as codes
    of 4 bits, which keep this order (`checkpoint/mxfp4.py`).
    """

    tensor: LogicalTensor
    hf_names: tuple[str, ...]
    transposed: bool = False

    def sections(self, segment: int) -> tuple[int, ...]:
        """Numbers of the segments that make up the Hugging Face tensor of `segment`, in order."""
        return tuple(number for number, name in enumerate(self.hf_names) if name == self.hf_names[segment])

    def hf_shape(self, segment: int) -> tuple[int, ...]:
        """Shape of the Hugging Face tensor of a segment; of experts of their stack."""
        shape, dim = list(self.tensor.segments[segment].shape), self._row_dim
        shape[dim] = sum(self.tensor.segments[number].shape[dim] for number in self.sections(segment))
        return tuple(shape)

    @property
    def _row_dim(self) -> int:
        """The dim of rows; dim 0 counts experts."""
        return 1 if self.tensor.is_expert else 0

    def first_row(self, segment: int) -> int:
        """The row of the Hugging Face tensor at which a segment begins."""
        dim = self._row_dim
        return sum(self.tensor.segments[number].shape[dim] for number in self.sections(segment) if number < segment)

    def in_hf(self, segment: int, box: Box) -> Box:
        """A box of a segment as a box of its Hugging Face tensor."""
        first, dim = self.first_row(segment), self._row_dim
        start, stop = box[dim]
        return (*box[:dim], (first + start, first + stop), *box[dim + 1 :])


EACH = "{expert}"
"""In the name of a folder's tensor that every expert has."""


def is_one_by_one(spec: ParamSpec) -> bool:
    """Whether the folder has a tensor for each expert."""
    return spec.tensor.is_expert and EACH in spec.hf_names[0]


def single(name: str, segment: Segment, tp_dim: int) -> ParamSpec:
    """A tensor of one segment, under the same name in Hugging Face and the rollout engine."""
    return ParamSpec(LogicalTensor(name, (segment,), tp_dim), (name,))


def by_heads(name: str, num_heads: int, size: int, columns: int) -> ParamSpec:
    """A matrix with `size` rows for each head, sharded by heads."""
    return single(name, Segment("heads", (num_heads * size, columns), num_heads), 0)


def whole(name: str, shape: tuple[int, ...]) -> ParamSpec:
    """A tensor that every TP rank holds whole."""
    return ParamSpec(LogicalTensor(name, (Segment("all", shape, 1),), None), (name,))


def vocab_matrix(name: str, vocab_size: int, hidden: int) -> ParamSpec:
    """A matrix with a row for each token of the vocabulary, sharded by rows."""
    rows = Segment("rows", (vocab_size, hidden), vocab_size)
    return ParamSpec(LogicalTensor(name, (rows,), tp_dim=0, is_vocab=True), (name,))
