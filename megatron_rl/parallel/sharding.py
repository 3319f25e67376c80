"""Cut whole tensors into the shards of ranks: pure interval arithmetic, one description for every layout.

A logical tensor is one or more segments stacked along the dim that tensor parallelism cuts: [q; k; v], [gate; up],
the rows of a vocabulary. Each segment is cut on its own, so a shard is a stack of pieces, one from each segment, and
never one interval of the whole. A `Part` says which box of which segment is where in a shard; all reading, writing
and moving of weights is derived from parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

Interval = tuple[int, int]
"""Half-open: [start, stop)."""
Box = tuple[Interval, ...]
"""One interval per dim."""


# Plans of large models make hundreds of thousands of these; named tuples are made and compared several times faster
# than dataclasses.


class Segment(NamedTuple):
    """One separately cut part of a tensor. `num_units` equal, indivisible units (heads, columns) lie along the cut."""

    name: str
    shape: tuple[int, ...]
    num_units: int


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor of the whole model, as the rollout engine names it and stacks its segments.

    tp_dim: the dim that tensor parallelism cuts and along which segments are stacked; None if every rank holds all.
    is_expert: dim 0 counts experts, cut by expert parallelism, and `tp_dim` is cut by expert tensor parallelism.
    is_vocab: rows are padded, so that the last ranks' shards may hold rows that are no token's.
    is_first_only: the first TP rank holds all of it and the others zeros of the same shape, as of a bias that is added
    to partial sums.
    """

    name: str
    segments: tuple[Segment, ...]
    tp_dim: int | None
    is_expert: bool = False
    is_vocab: bool = False
    is_first_only: bool = False

    @cached_property
    def alike(self) -> AlikeTensors:
        """Its fields without the name, which the tensors of other layers share."""
        return AlikeTensors(self.segments, self.tp_dim, self.is_expert, self.is_vocab, self.is_first_only)

    @property
    def numel(self) -> int:
        """Elements of the whole tensor without padding."""
        return sum(math.prod(segment.shape) for segment in self.segments)

    @property
    def is_split(self) -> bool:
        """Whether tensor parallelism cuts it. Segments of one unit each are stacked, and whole on every rank."""
        return self.tp_dim is not None and any(segment.num_units > 1 for segment in self.segments)


class AlikeTensors(NamedTuple):
    """The fields of `LogicalTensor` but for the name: tensors that are cut alike."""

    segments: tuple[Segment, ...]
    tp_dim: int | None
    is_expert: bool
    is_vocab: bool
    is_first_only: bool = False


class Place(NamedTuple):
    """One rank's place in a layout of weights. `vocab_multiple`: vocabularies are padded up to a multiple of it."""

    tp_rank: int
    tp_size: int
    vocab_multiple: int
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1


@dataclass(frozen=True)
class Part:
    """The box of segment number `segment` that is at `at` (one index per dim) in a rank's shard."""

    segment: int
    box: Box
    at: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of this part in the shard's tensor."""
        return tuple(slice(at, at + stop - start) for at, (start, stop) in zip(self.at, self.box, strict=True))


@dataclass(frozen=True)
class Shard:
    """The elements of a logical tensor on one rank; elements outside all parts are padding."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_padded(self) -> bool:
        return self.numel != sum(box_numel(part.box) for part in self.parts)


def shard_of(tensor: LogicalTensor, place: Place) -> Shard:
    """The shard of `tensor` at `place`; one object for all alike tensors. Raises ValueError if it cannot be cut."""
    try:
        return _shard(tensor.alike, place)
    except ValueError as error:
        raise ValueError(f"{tensor.name}: {error}") from None


@lru_cache(maxsize=1 << 16)
def _shard(tensor: AlikeTensors, place: Place) -> Shard:
    if tensor.is_vocab:
        return _vocab_shard(tensor, place)
    tp_rank, tp_size = (place.etp_rank, place.etp_size) if tensor.is_expert else (place.tp_rank, place.tp_size)
    shape = list(tensor.segments[0].shape)
    if tensor.is_expert:
        experts = _even_cut("experts", shape[0], place.ep_rank, place.ep_size)
        shape[0] = experts[1] - experts[0]
    if tensor.is_first_only and tp_rank > 0:
        return Shard(tuple(shape), ())
    parts, offset = [], 0
    for number, segment in enumerate(tensor.segments):
        box = [(0, size) for size in segment.shape]
        at = [0] * len(box)
        if tensor.is_expert:
            box[0] = experts
        if tensor.tp_dim is not None:
            box[tensor.tp_dim] = cut(segment, tensor.tp_dim, tp_rank, tp_size)
            at[tensor.tp_dim] = offset
            offset += length(box[tensor.tp_dim])
        parts.append(Part(number, tuple(box), tuple(at)))
    if tensor.tp_dim is not None:
        shape[tensor.tp_dim] = offset
    return Shard(tuple(shape), tuple(parts))


def cut(segment: Segment, dim: int, rank: int, size: int) -> Interval:
    """Rank `rank`'s interval of `segment` along `dim`: an equal share of units, or one unit that several ranks hold.

    Raises ValueError when neither `size` divides the number of units nor that divides `size`.
    """
    units = segment.num_units
    unit = segment.shape[dim] // units
    if units % size == 0:
        share = units // size * unit
        return rank * share, (rank + 1) * share
    if size % units == 0:
        first = rank * units // size * unit
        return first, first + unit
    raise ValueError(f"tp({size}) and the {units} units of {segment.name} do not divide each other")


def is_first_copy(tensor: LogicalTensor, place: Place) -> bool:
    """Whether no earlier rank of the tensor-parallel group at `place` holds the same elements."""
    return tensor.is_split or (place.etp_rank if tensor.is_expert else place.tp_rank) == 0


def vocab_multiple(make_vocab_size_divisible_by: int, tp_size: int) -> int:
    """Training pads its vocabulary to a multiple of this: of the given number, and so that TP ranks get equal parts."""
    return math.lcm(make_vocab_size_divisible_by, tp_size)


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Rows of a vocabulary matrix after padding."""
    return -(-vocab_size // multiple) * multiple


def _vocab_shard(tensor: AlikeTensors, place: Place) -> Shard:
    (segment,) = tensor.segments
    vocab_size, *rest = segment.shape
    padded = padded_vocab_size(vocab_size, place.vocab_multiple)
    start, stop = _even_cut("padded rows", padded, place.tp_rank, place.tp_size)
    shape = (stop - start, *rest)
    if start >= vocab_size:
        return Shard(shape, ())
    box = ((start, min(stop, vocab_size)), *((0, size) for size in rest))
    return Shard(shape, (Part(0, box, (0,) * len(shape)),))


def _even_cut(what: str, total: int, rank: int, size: int) -> Interval:
    if total % size:
        raise ValueError(f"{size} ranks do not divide the {total} {what}")
    share = total // size
    return rank * share, (rank + 1) * share


def length(interval: Interval) -> int:
    """Elements of an interval."""
    return interval[1] - interval[0]


def box_shape(box: Box) -> tuple[int, ...]:
    """Extent of a box along each dim."""
    return tuple([stop - start for start, stop in box])


def box_index(box: Box) -> tuple[slice, ...]:
    """The index of a box in the tensor of its whole segment."""
    return tuple(slice(start, stop) for start, stop in box)


def box_numel(box: Box) -> int:
    """Elements of a box."""
    return math.prod(box_shape(box))


def intersect(one: Box, other: Box) -> Box | None:
    """The common part of two boxes of the same segment; None if they have none."""
    common = []
    for (start, stop), (other_start, other_stop) in zip(one, other, strict=True):
        low, high = max(start, other_start), min(stop, other_stop)
        if low >= high:
            return None
        common.append((low, high))
    return tuple(common)
