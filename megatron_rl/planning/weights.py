"""Parameters of each rank in training, and the layout of Megatron's flat buffers: arithmetic, no torch.

Shapes come from `model/families` and shards from `parallel/sharding`; nothing is described a second time.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_rl.config.megatron import OverrideDDPConfig
from megatron_rl.hybrid_engine.layout import Slot
from megatron_rl.hybrid_engine.plan import Member
from megatron_rl.hybrid_engine.plan import aligned as aligned  # for mapping, too
from megatron_rl.model.families import HEAD, ParamSpec
from megatron_rl.model.families.vision import TOWER
from megatron_rl.parallel.muon_runs import is_muon_matrix, runs_in_bucket
from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid
from megatron_rl.parallel.sharding import Interval, Place, length, shard_of
from megatron_rl.parallel.stages import StagePlan

LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
EMBEDDING = "embedding.word_embeddings.weight"
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""By dtype of a model."""
BUCKET_MULTIPLE = 128
"""Elements. Buckets are padded to a multiple of it and of the ranks that shard the optimizer's state."""


def bucket_numel(override: OverrideDDPConfig, num_replicas: int) -> int | None:
    """Return the elements of a bucket, Megatron's default where none is set; None: one bucket for all."""
    if not override.overlap_grad_reduce:
        return None
    return override.bucket_size or max(40_000_000, 1_000_000 * num_replicas)


def is_tied(specs: Mapping[str, ParamSpec]) -> bool:
    """Return whether the head shares the embedding's weight. Adapters have neither."""
    return EMBEDDING in specs and specs[EMBEDDING] == specs.get(HEAD)


class ParamRun(NamedTuple):
    """Parameters that follow each other in a buffer on one rank, aligned.

    names, numels: in the buffer's order, in DDP's last to first. total: elements. aligned: with each start aligned.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    total: int
    aligned: int

    @property
    def single(self) -> list[ParamRun]:
        """One block for each parameter."""
        return [ParamRun((name,), (n,), n, aligned(n)) for name, n in zip(self.names, self.numels, strict=True)]


class ModelParams:
    """A model's parameters by layer. The shards of a layer are counted once for all layers that are cut alike.

    buffers: those laid out so far (`TrainedWeights.buffers`). runs: what is in them, however they are padded.
    """

    def __init__(self, specs: Mapping[str, ParamSpec]) -> None:
        self.specs = specs
        self.is_tied = is_tied(specs)
        self.before: list[str] = []
        self.after: list[str] = []
        self.tower: list[str] = []  # of the first chunk, behind all others
        layers: dict[int, list[str]] = {}
        for name in specs:
            if match := LAYER.match(name):
                layers.setdefault(int(match[1]), []).append(name)
            elif name.startswith(TOWER):
                self.tower.append(name)
            else:
                (self.before if name.startswith("embedding") else self.after).append(name)
        self._layers = {layer: self._parted(names) for layer, names in layers.items()}
        first: dict[object, int] = {}
        self._first_alike = {
            layer: first.setdefault(tuple(specs[name].tensor.alike for name in names), layer)
            for layer, names in layers.items()
        }
        self._numels: dict[tuple[int, bool | None, Place], tuple[int, ...]] = {}
        self._blocks: dict[tuple[int, bool | None, Place], ParamRun | None] = {}
        self.buffers: dict[object, list[FlatBuffer]] = {}
        self.runs: dict[object, list[BufferRuns]] = {}

    def _parted(self, names: Sequence[str]) -> dict[bool | None, tuple[str, ...]]:
        """Return the dense parameters and those of experts, each last to first, and under None all, first to last."""
        parted: dict[bool | None, tuple[str, ...]] = {
            kind: tuple(name for name in reversed(names) if self.specs[name].tensor.is_expert is kind)
            for kind in (False, True)
        }
        return parted | {None: tuple(names)}

    def layer(self, layer: int, place: Place, *, is_expert: bool | None) -> ParamRun | None:
        """Return the dense parameters of a layer, or its experts, or with is_expert=None both. None: it has no such."""
        key = (layer, is_expert, place)
        if key not in self._blocks:
            names = self._layers[layer][is_expert] if layer in self._layers else ()
            self._blocks[key] = self._block(names, (self._first_alike[layer], is_expert, place)) if names else None
        return self._blocks[key]

    def _block(self, names: tuple[str, ...], alike: tuple[int, bool | None, Place]) -> ParamRun:
        if alike not in self._numels:
            self._numels[alike] = tuple(shard_of(self.specs[name].tensor, alike[2]).numel for name in names)
        numels = self._numels[alike]
        return ParamRun(names, numels, sum(numels), sum(map(aligned, numels)))

    def alone(self, name: str, place: Place) -> ParamRun:
        """Return a parameter outside of the layers."""
        numel = shard_of(self.specs[name].tensor, place).numel
        return ParamRun((name,), (numel,), numel, aligned(numel))


class BufferRuns(NamedTuple):
    """What one of DDP's buffers of a stage holds. chunk: its number. blocks: parameters, last to first."""

    chunk: int
    is_expert: bool
    blocks: tuple[ParamRun, ...]


@dataclass(frozen=True)
class FlatBuffer:
    """One of DDP's buffers on a rank, of dense parameters or of experts; or that of all frozen ones.

    blocks, starts: parameters in order, and where they start. numel: elements with padding; num_params: without.
    is_still: its parameters are frozen next to others that are trained.
    """

    is_expert: bool
    blocks: tuple[ParamRun, ...]
    starts: tuple[int, ...]
    numel: int
    num_params: int
    is_still: bool = False
    stops: tuple[int, ...] = ()
    """Where buckets end; (): there is one."""

    def muon_numels(self, specs: Mapping[str, ParamSpec], size: int) -> list[int]:
        """Return the elements that Muon updates on each of `size` ranks, which have equal parts of every bucket."""
        return self.numels_of_ranks(size, {name for name in specs if is_muon_matrix(name, specs[name].tensor)})

    def numels_of_ranks(self, size: int, names: Container[str] | None = None) -> list[int]:
        """Return the elements of parameters, without padding, on each of `size` ranks, which have equal parts of every
        bucket. names: of these alone.
        """
        numels, stops = [0] * size, self.stops or (self.numel,)
        for name, start in self.offsets:
            if names is None or name in names:
                begin, stop = bucket_around(stops, start)
                runs = runs_in_bucket(start - begin, start - begin + self.numels[name], stop - begin, size)
                numels = [numel + length(run) for numel, run in zip(numels, runs, strict=True)]
        return numels

    @cached_property
    def numels(self) -> dict[str, int]:
        """Parameter -> elements of its shard."""
        return {name: numel for block in self.blocks for name, numel in zip(block.names, block.numels, strict=True)}

    @property
    def offsets(self) -> Iterator[tuple[str, int]]:
        """Each parameter, and where it starts."""
        for block, start in zip(self.blocks, self.starts, strict=True):
            for name, numel in zip(block.names, block.numels, strict=True):
                yield name, start
                start += aligned(numel)

    @cached_property
    def largest(self) -> tuple[int, int]:
        """Elements of the largest gradient in layers, and of that outside of them. Stacked experts also have their
        parts.
        """
        found = [0, 0]
        for block in self.blocks:
            kind = 0 if LAYER.match(block.names[0]) else 1
            found[kind] = max(found[kind], max(block.numels) * (2 if self.is_expert else 1))
        return found[0], found[1]


@dataclass(frozen=True)
class TrainedWeights:
    """A model's parameters under a training layout. All ranks of one stage hold shards of the same sizes.

    vocab_multiple: to which the vocabulary is padded. bucket_numel: elements of a bucket in the buffers that have
    several; None: every buffer is one bucket. is_frozen: the parameters lie next to adapters, in one buffer without
    padding (`roles.flat_parameters.FrozenBuffer`), and not in DDP's. still: of the last stage, those that lie so while
    the others are trained.
    """

    params: ModelParams
    stages: StagePlan
    grid: TrainGrid
    vocab_multiple: int
    bucket_numel: int | None = None
    is_frozen: bool = False
    still: frozenset[str] = frozenset()

    @cached_property
    def shares(self) -> dict[bool, int]:
        """Ranks that share the optimizer's state of dense parameters (False), and of experts (True)."""
        grid = self.grid
        return {False: grid.num_replicas, True: grid.stage_size // (grid.expert_tp_size * grid.ep_size)}

    def num_params(self, pp_rank: int) -> int:
        """Return the parameters of one rank of a stage, vocabulary padding included, as Megatron counts them."""
        return sum(buffer.num_params for buffer in self.buffers(pp_rank))

    def numel(self, pp_rank: int) -> int:
        """Return the elements of all buffers of one rank of a stage."""
        return sum(buffer.numel for buffer in self.buffers(pp_rank))

    def moving_buffers(self, pp_rank: int) -> list[FlatBuffer]:
        """Return the buffers of a stage whose parameters have gradients, where some have."""
        return [buffer for buffer in self.buffers(pp_rank) if not buffer.is_still]

    def moving_numel(self, pp_rank: int) -> int:
        """Return the elements of those."""
        return sum(buffer.numel for buffer in self.moving_buffers(pp_rank))

    def optimizer_share(self, pp_rank: int) -> int:
        """Return the elements whose optimizer state one rank keeps."""
        return sum(buffer.numel // self.shares[buffer.is_expert] for buffer in self.moving_buffers(pp_rank))

    def fewest_of_muon(self, pp_rank: int) -> int:
        """Return the elements that Muon updates on the rank of a stage which has the fewest of them."""
        fewest = 0
        for is_expert, size in self.shares.items():
            buffers = [each for each in self.moving_buffers(pp_rank) if each.is_expert is is_expert]
            of_ranks = zip(*(buffer.muon_numels(self.params.specs, size) for buffer in buffers), strict=True)
            fewest += min(map(sum, of_ranks), default=0)
        return fewest

    def shard_numels(self, pp_rank: int) -> dict[str, int]:
        """Return parameter -> elements of its shard on one rank of a stage."""
        return {name: numel for buffer in self.buffers(pp_rank) for name, numel in buffer.numels.items()}

    def largest(self, pp_rank: int) -> tuple[int, int]:
        """Return the elements of a stage's largest gradient in layers, and of that outside of them."""
        sizes = [buffer.largest for buffer in self.moving_buffers(pp_rank)]
        return max((in_layers for in_layers, _ in sizes), default=0), max((others for _, others in sizes), default=0)

    def names(self, pp_rank: int) -> list[str]:
        """Return the parameters of a stage. A tied head is one of its own where the last stage is not the first."""
        return [name for buffer in self.buffers(pp_rank) for block in buffer.blocks for name in block.names]

    def buffers(self, pp_rank: int) -> list[FlatBuffer]:
        """Return the buffers of a stage in Megatron's order: of each chunk the dense parameters, then the experts.

        They differ between numbers of replicas only where the multiple of their buckets does.
        """
        if pp_rank not in self._found:
            place = self.grid.place(pp_rank * self.grid.stage_size, self.vocab_multiple)
            multiples = tuple(math.lcm(shares, BUCKET_MULTIPLE) for shares in self.shares.values())
            key = (self.stages, pp_rank, place, multiples, self.bucket_numel, self.is_frozen, self.still)
            if key not in self.params.buffers:
                made = self._frozen_buffers(pp_rank, place) if self.is_frozen else None
                self.params.buffers[key] = made or self._stage_buffers(pp_rank, place, multiples)
            self._found[pp_rank] = self.params.buffers[key]
        return self._found[pp_rank]

    @cached_property
    def _found(self) -> dict[int, list[FlatBuffer]]:
        return {}

    def _stage_buffers(self, pp_rank: int, place: Place, multiples: tuple[int, ...]) -> list[FlatBuffer]:
        key = (self.stages, pp_rank, place, self.still)
        if key not in self.params.runs:
            self.params.runs[key] = list(self._stage_runs(pp_rank, place))
        buffers: list[FlatBuffer] = []
        for number, is_expert, blocks in self.params.runs[key]:
            # Megatron makes one bucket for other stages and chunks: the rest does not wait for their traffic.
            bucket_numel = self.bucket_numel if pp_rank == number == 0 else None
            buffers.append(self._buffer(blocks, multiples[is_expert], bucket_numel, is_expert=is_expert))
        if self.still and pp_rank == self.stages.pp_size - 1:
            names = [name for name in self._after if name in self.still]
            buffers.append(_one_buffer([self.params.alone(name, place) for name in names], is_still=True))
        return buffers

    def _stage_runs(self, pp_rank: int, place: Place) -> Iterator[BufferRuns]:
        """Yield what is in each of DDP's buffers of a stage, in their order."""
        chunks, pp_size = self.stages.layers(pp_rank), self.stages.pp_size
        for number, layers in enumerate(chunks):
            is_end = pp_rank == pp_size - 1 and number == len(chunks) - 1
            for is_expert in (False, True):
                found = [self.params.layer(layer, place, is_expert=is_expert) for layer in reversed(layers)]
                blocks = [block for block in found if block is not None]
                after = [name for name in self._after if name not in self.still] if is_end else []
                before = self.params.before if pp_rank == number == 0 else []
                tower = self.params.tower if pp_rank == number == 0 else []
                ends = [self._alone(reversed(names), place, is_expert=is_expert) for names in (tower, after, before)]
                blocks = [*ends[0], *ends[1], *blocks, *ends[2]]
                if blocks:
                    yield BufferRuns(number, is_expert, tuple(blocks))

    def _alone(self, names: Iterable[str], place: Place, *, is_expert: bool) -> list[ParamRun]:
        """Return those of the parameters outside of the layers that are dense, or those of experts."""
        specs = self.params.specs
        return [self.params.alone(name, place) for name in names if specs[name].tensor.is_expert is is_expert]

    @property
    def _after(self) -> list[str]:
        """Parameters after the layers. A head that the embedding's stage ties is none of its own."""
        is_one = self.params.is_tied and self.stages.pp_size == 1
        return [name for name in self.params.after if not (is_one and name == HEAD)]

    def _frozen_buffers(self, pp_rank: int, place: Place) -> list[FlatBuffer]:
        """Return the one buffer of a stage whose parameters are frozen: first to last, each start aligned."""
        layers = [layer for chunk in self.stages.layers(pp_rank) for layer in chunk]
        by_layer = [self.params.layer(layer, place, is_expert=None) for layer in layers]
        before = self.params.before if pp_rank == 0 else []
        after = self._after if pp_rank == self.stages.pp_size - 1 else []
        ends = [[self.params.alone(name, place) for name in names] for names in (before, after)]
        return [_one_buffer([*ends[0], *(block for block in by_layer if block is not None), *ends[1]])]

    def _buffer(
        self, blocks: Sequence[ParamRun], multiple: int, bucket_numel: int | None, *, is_expert: bool
    ) -> FlatBuffer:
        """Lay parameters out with aligned starts and buckets padded to a multiple. A matrix that two stages tie has
        its own bucket.
        """
        is_shared = self.params.is_tied and self.stages.pp_size > 1
        if bucket_numel is not None:
            blocks = [each for block in blocks for each in block.single]
        stops: list[int] = []
        starts, end, filled = [], 0, 0  # end: of all full buckets; filled: elements in the open one
        for block in blocks:
            alone = is_shared and block.names[0] in (EMBEDDING, HEAD)
            if alone:
                end, filled = end + _round_up(filled, multiple), 0
                stops.append(end)
            starts.append(end + filled)
            is_full = bucket_numel is not None and filled + block.total >= bucket_numel
            filled += block.aligned
            if alone or is_full:
                end, filled = end + _round_up(filled, multiple), 0
                stops.append(end)
        num_params, numel = sum(block.total for block in blocks), end + _round_up(filled, multiple)
        return FlatBuffer(is_expert, tuple(blocks), tuple(starts), numel, num_params, stops=(*stops, numel))

    def members(self, group: Sequence[int], rollout: RolloutGrid, ranks_per_node: int, padding: int) -> list[Member]:
        """Return what the ranks of an exchange group hold in training and need for generation.

        padding: multiple to which the rollout engine pads the vocabulary. A tower stays where it is trained.
        """
        members, specs, tower = [], self.params.specs, {*self.params.tower}
        for rank in group:
            place = self.grid.place(rank, self.vocab_multiple)
            held = [
                Slot(specs[name].tensor.name, number, offset, shard_of(specs[name].tensor, place))
                for number, buffer in enumerate(self.buffers(self.grid.pp_rank(rank)))
                for name, offset in buffer.offsets
                if name not in tower
            ]
            wanted = rollout.place(rank, padding)
            members.append(Member(rank, rank // ranks_per_node, self.grid.tp_rank(rank), tuple(held), wanted))
        return members


def bucket_around(stops: Sequence[int], start: int) -> Interval:
    """Return the bucket of an element. stops: the ends of all."""
    number = bisect_right(stops, start)
    return (stops[number - 1] if number else 0), stops[number]


def _one_buffer(blocks: Sequence[ParamRun], *, is_still: bool = False) -> FlatBuffer:
    """Lay frozen parameters into one buffer, first to last, each start aligned."""
    starts = [sum(block.aligned for block in blocks[:number]) for number in range(len(blocks))]
    last = blocks[-1].numels[-1]
    numel = starts[-1] + blocks[-1].aligned - aligned(last) + last
    return FlatBuffer(False, tuple(blocks), tuple(starts), numel, sum(block.total for block in blocks), is_still)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
