"""Parameters of each rank in training, and the layout of Megatron's flat buffers: arithmetic, no torch.

Shapes come from `model/families` and shards from `parallel/sharding`; nothing is described a second time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron_rl.config.megatron import OverrideDDPConfig
from megatron_rl.hybrid_engine.layout import Slot
from megatron_rl.hybrid_engine.plan import ALIGNMENT, Member
from megatron_rl.model.families import HEAD, ParamSpec
from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid
from megatron_rl.parallel.sharding import shard_of
from megatron_rl.parallel.stages import StagePlan

LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
EMBEDDING = "embedding.word_embeddings.weight"
BUCKET_MULTIPLE = 128
"""Elements. Buckets are padded to a multiple of it and of the ranks that shard the optimizer's state."""


def bucket_numel(override: OverrideDDPConfig, num_replicas: int) -> int | None:
    """Return the elements of a bucket, Megatron's default where none is set; None: one bucket for all."""
    if not override.overlap_grad_reduce:
        return None
    return override.bucket_size or max(40_000_000, 1_000_000 * num_replicas)


def stage_params(specs: dict[str, ParamSpec], stages: StagePlan, pp_rank: int) -> list[list[str]]:
    """Return the parameter names of each chunk of a stage, in the order of Megatron's buffers: last to first.

    A tied head is a parameter of its own where the last stage is not the first.
    """
    chunks = stages.layers(pp_rank)
    names: list[list[str]] = [[] for _ in chunks]
    is_last = pp_rank == stages.pp_size - 1
    for name in specs:
        layer = LAYER.match(name)
        if layer:
            for chunk, layers in enumerate(chunks):
                if int(layer[1]) in layers:
                    names[chunk].append(name)
        elif name.startswith("embedding"):
            names[0] += [name] if pp_rank == 0 else []
        elif is_last and not (name == HEAD and is_tied(specs) and stages.pp_size == 1):
            names[-1].append(name)
    return [chunk[::-1] for chunk in names]


def is_tied(specs: dict[str, ParamSpec]) -> bool:
    """Return whether the head shares the embedding's weight."""
    return specs[EMBEDDING] == specs[HEAD]


@dataclass(frozen=True)
class FlatBuffer:
    """One of DDP's buffers on a rank.

    names, offsets: parameters in order, and where they start. numel: elements with padding; num_params: without.
    num_shares: ranks that shard the optimizer's state of this buffer.
    """

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    numel: int
    num_params: int
    num_shares: int


@dataclass(frozen=True)
class TrainedWeights:
    """A model's parameters under a training layout. All ranks of one stage hold shards of the same sizes.

    vocab_multiple: to which the vocabulary is padded. bucket_numel: elements of a bucket in the buffers that have
    several; None: every buffer is one bucket.
    """

    specs: dict[str, ParamSpec] = field(hash=False)
    stages: StagePlan
    grid: TrainGrid
    vocab_multiple: int
    bucket_numel: int | None = None

    def num_params(self, pp_rank: int) -> int:
        """Return the parameters of one rank of a stage, vocabulary padding included, as Megatron counts them."""
        return sum(buffer.num_params for buffer in self.buffers[pp_rank])

    def numel(self, pp_rank: int) -> int:
        """Return the elements of all buffers of one rank of a stage."""
        return sum(buffer.numel for buffer in self.buffers[pp_rank])

    def optimizer_share(self, pp_rank: int) -> int:
        """Return the elements whose optimizer state one rank keeps."""
        return sum(buffer.numel // buffer.num_shares for buffer in self.buffers[pp_rank])

    def shard_numels(self, pp_rank: int) -> dict[str, int]:
        """Return parameter -> elements of its shard on one rank of a stage."""
        place = self.grid.place(pp_rank * self.grid.stage_size, self.vocab_multiple)
        names = [name for buffer in self.buffers[pp_rank] for name in buffer.names]
        return {name: shard_of(self.specs[name].tensor, place).numel for name in names}

    @cached_property
    def buffers(self) -> list[list[FlatBuffer]]:
        """The buffers of each stage in Megatron's order: of each chunk the dense parameters, then the experts."""
        return [self._stage_buffers(pp_rank) for pp_rank in range(self.stages.pp_size)]

    def _stage_buffers(self, pp_rank: int) -> list[FlatBuffer]:
        grid = self.grid
        expert_shares = grid.stage_size // (grid.expert_tp_size * grid.ep_size)
        buffers = []
        for chunk, names in enumerate(stage_params(self.specs, self.stages, pp_rank)):
            # Megatron makes one bucket for other stages and chunks: the rest does not wait for their traffic.
            bucket_numel = self.bucket_numel if pp_rank == chunk == 0 else None
            experts = [name for name in names if self.specs[name].tensor.is_expert]
            dense = [name for name in names if not self.specs[name].tensor.is_expert]
            buffers += [
                self._buffer(group, shares, pp_rank, bucket_numel)
                for group, shares in ((dense, grid.num_replicas), (experts, expert_shares))
                if group
            ]
        return buffers

    def _buffer(self, names: Sequence[str], num_shares: int, pp_rank: int, bucket_numel: int | None) -> FlatBuffer:
        """Lay parameters out with aligned starts and padded buckets. A matrix that two stages tie has its own
        bucket.
        """
        place = self.grid.place(pp_rank * self.grid.stage_size, self.vocab_multiple)
        is_shared = is_tied(self.specs) and self.stages.pp_size > 1
        multiple = math.lcm(num_shares, BUCKET_MULTIPLE)
        offsets, bucket_start, end, total = [], 0, 0, 0
        for name in names:
            numel = shard_of(self.specs[name].tensor, place).numel
            alone = is_shared and name in (EMBEDDING, HEAD)
            start = aligned(end)
            if alone and end:
                start = _round_up(start, multiple)
            offsets.append(start)
            end = start + numel
            total += numel
            if alone or (bucket_numel is not None and end - bucket_start >= bucket_numel):
                bucket_start = end = _round_up(end, multiple)
        return FlatBuffer(tuple(names), tuple(offsets), _round_up(end, multiple), total, num_shares)

    def members(self, group: Sequence[int], rollout: RolloutGrid, ranks_per_node: int, padding: int) -> list[Member]:
        """Return what the ranks of an exchange group hold in training and need for generation.

        padding: multiple to which the rollout engine pads the vocabulary.
        """
        members = []
        for rank in group:
            place = self.grid.place(rank, self.vocab_multiple)
            held = [
                Slot(self.specs[name].tensor.name, number, offset, shard_of(self.specs[name].tensor, place))
                for number, buffer in enumerate(self.buffers[self.grid.pp_rank(rank)])
                for name, offset in zip(buffer.names, buffer.offsets, strict=True)
            ]
            wanted = rollout.place(rank, padding)
            members.append(Member(rank, rank // ranks_per_node, self.grid.tp_rank(rank), tuple(held), wanted))
        return members


def aligned(numel: int) -> int:
    """Round elements up to the alignment of parameters in a flat buffer."""
    return _round_up(numel, ALIGNMENT)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
