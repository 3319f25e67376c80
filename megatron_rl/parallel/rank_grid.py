"""The places of ranks in the training and rollout grids: pure arithmetic.

Training, in Megatron's order:   rank = tp_rank + tp_size * (cp_rank + cp_size * (dp_rank + dp_size * pp_rank))
                        experts: rank = etp_rank + etp_size * (ep_rank + ep_size * (...)) within one stage
Context-parallel ranks read parts of the same rows with the same weights. For weights, gradients and generation they are
replicas like data-parallel ranks; the two differ only in which rows they get.
Rollout of TP size t_g, in blocks of lcm(t, t_g) consecutive ranks, with k = lcm(t, t_g) / t_g:
    micro-DP groups   k consecutive ranks, which hold the same shard         TP4 -> TP2: [0,1], [2,3]
    rollout TP groups every k-th rank; where t_g divides t, each rank's      TP4 -> TP2: [0,2], [1,3]
                      shard is inside the rollout shard it serves
Each rollout TP group is one replica: it generates for its own prompts. Its ranks hold a part of every expert, or with
expert parallelism whole experts: rank i of e_g = t_g the i-th share of them.
With attention data parallelism d_g > 1 a replica is d_g rollout TP groups that share e_g = t_g * d_g shares of experts:
the same arithmetic, with t_g * d_g in place of t_g, makes replicas, and TP groups are t_g consecutive ranks of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.config.rollout_keys import RolloutConfig
from megatron_rl.parallel.context_packs import pack_sizes
from megatron_rl.parallel.sharding import Place


@dataclass(frozen=True)
class TrainSizes:
    """The sizes of a training layout of `world_size` ranks; raises ValueError when they do not divide it.

    etp_size: tensor parallelism of experts; None: tp_size, as in Megatron. cp_size: ranks that get the same rows.
    most_sharing: the most ranks of these that share a sequence, with dynamic context parallelism (`context_packs.py`);
    None: all of them share every sequence.
    """

    world_size: int
    tp_size: int
    pp_size: int
    ep_size: int = 1
    etp_size: int | None = None
    cp_size: int = 1
    most_sharing: int | None = None

    def __post_init__(self) -> None:
        if self.world_size % (self.tp_size * self.cp_size * self.pp_size):
            cp = f"cp({self.cp_size}) * " if self.cp_size > 1 else ""
            sizes = f"tp({self.tp_size}) * {cp}pp({self.pp_size})"
            raise ValueError(f"{sizes} does not divide world_size({self.world_size})")
        if self.stage_size % (self.expert_tp_size * self.ep_size):
            raise ValueError(
                f"etp({self.expert_tp_size}) * ep({self.ep_size}) does not divide "
                f"the {self.stage_size} ranks of a stage"
            )

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks: groups of ranks that get rows of their own."""
        return self.num_replicas // self.cp_size

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same shard of dense weights: dp_size * cp_size."""
        return self.world_size // (self.tp_size * self.pp_size)

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world_size // self.pp_size

    @property
    def expert_tp_size(self) -> int:
        return self.tp_size if self.etp_size is None else self.etp_size

    @property
    def experts_join_dp_ranks(self) -> bool:
        """Whether data-parallel ranks hold different experts, and so can only run a micro-batch together."""
        return self.tp_size * self.cp_size % (self.expert_tp_size * self.ep_size) != 0


class TrainGrid(TrainSizes):
    """The places of ranks in a training layout."""

    def place(self, rank: int, vocab_multiple: int) -> Place:
        """The place of a rank's shards in its stage's tensors."""
        inside = rank % self.stage_size
        return Place(
            tp_rank=self.tp_rank(rank),
            tp_size=self.tp_size,
            vocab_multiple=vocab_multiple,
            ep_rank=inside // self.expert_tp_size % self.ep_size,
            ep_size=self.ep_size,
            etp_rank=inside % self.expert_tp_size,
            etp_size=self.expert_tp_size,
        )

    def is_first_replica(self, rank: int, *, of_experts: bool) -> bool:
        """Whether no earlier rank of the stage is at the same place of dense weights, or of experts."""
        return rank % self.stage_size < (self.expert_tp_size * self.ep_size if of_experts else self.tp_size)

    def exchange_group(self, rank: int) -> list[int]:
        """The ranks that together hold exactly one copy of all experts, and whole copies of everything else.

        These are all stages of one data-parallel rank, or of several neighbouring ones that share experts.
        """
        block = math.lcm(self.tp_size, self.expert_tp_size * self.ep_size)
        first = rank % self.stage_size // block * block
        return [stage * self.stage_size + first + i for stage in range(self.pp_size) for i in range(block)]

    def exchange_groups(self) -> list[list[int]]:
        """Every exchange group once; they partition the ranks."""
        block = len(self.exchange_group(0)) // self.pp_size
        return [self.exchange_group(first) for first in range(0, self.stage_size, block)]

    def rank(self, tp_rank: int, dp_rank: int, pp_rank: int, cp_rank: int = 0) -> int:
        return tp_rank + self.tp_size * (cp_rank + self.cp_size * (dp_rank + self.dp_size * pp_rank))

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp_size

    def cp_rank(self, rank: int) -> int:
        return rank // self.tp_size % self.cp_size

    def dp_rank(self, rank: int) -> int:
        return rank // (self.tp_size * self.cp_size) % self.dp_size

    def pp_rank(self, rank: int) -> int:
        return rank // self.stage_size

    def tp_groups(self) -> list[list[int]]:
        """Ranks that share layers: consecutive."""
        return self._groups(self.tp_size, 1)

    def cp_groups(self) -> list[list[int]]:
        """Ranks that hold the same shard and read parts of the same rows."""
        return self._groups(self.cp_size, self.tp_size)

    def pack_groups(self, size: int) -> list[list[int]]:
        """Groups of ranks that share packs of this size: neighbours in every context-parallel group."""
        return [group[first : first + size] for group in self.cp_groups() for first in range(0, self.cp_size, size)]

    @property
    def pack_sizes(self) -> list[int]:
        """Numbers of ranks that may share a pack with dynamic context parallelism; else []."""
        return [] if self.most_sharing is None else pack_sizes(self.most_sharing)

    def dp_groups(self) -> list[list[int]]:
        """Ranks that hold the same shard and read the same parts of different rows."""
        return self._groups(self.dp_size, self.tp_size * self.cp_size)

    def pp_groups(self) -> list[list[int]]:
        """Ranks that hold the stages of one model replica at one TP coordinate, first stage first."""
        return self._groups(self.pp_size, self.stage_size)

    def _groups(self, size: int, stride: int) -> list[list[int]]:
        """Groups of `size` ranks that are `stride` apart, by their first rank; they partition the ranks."""
        firsts = (rank for rank in range(self.world_size) if rank // stride % size == 0)
        return [[first + stride * place for place in range(size)] for first in firsts]


def train_grid(world_size: int, megatron: MegatronConfig) -> TrainGrid:
    """The grid of a pool. With dynamic context parallelism all ranks with the same weights get the same rows, so there
    is one data-parallel rank. Raises ValueError for sizes that do not divide.
    """
    sizes = TrainSizes(
        world_size,
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.expert_model_parallel_size,
        megatron.expert_tensor_parallel_size,
        megatron.context_parallel_size,
    )
    most_sharing = None
    if megatron.dynamic_context_parallel and sizes.cp_size > 1:
        sizes, most_sharing = replace(sizes, cp_size=sizes.num_replicas), sizes.cp_size
    return TrainGrid(
        sizes.world_size, sizes.tp_size, sizes.pp_size, sizes.ep_size, sizes.etp_size, sizes.cp_size, most_sharing
    )


@dataclass(frozen=True)
class RolloutGrid:
    """The generation layout over the same ranks; raises ValueError when tp_size does not divide their number.

    ep_size: 1, where TP cuts every expert, or tp_size * dp_size, where every rank of a replica holds its share of whole
    experts. dp_size: TP groups of a replica, which share its experts and nothing else.
    Ranks ascend inside every group, because torch numbers the members of a group in that order.
    """

    train: TrainGrid
    tp_size: int
    ep_size: int = 1
    dp_size: int = 1

    def __post_init__(self) -> None:
        tp = f"rollout tp({self.tp_size})"
        if self.dp_size > 1:
            tp += f" * dp({self.dp_size})"
        if self.ep_size != self.replica_size and (self.ep_size, self.dp_size) != (1, 1):
            raise ValueError(f"rollout ep({self.ep_size}) is neither 1 nor {tp}")
        if self.train.world_size % self.replica_size:
            raise ValueError(f"{tp} does not divide world_size({self.train.world_size})")

    @property
    def replica_size(self) -> int:
        """Ranks of a replica."""
        return self.tp_size * self.dp_size

    @property
    def block_size(self) -> int:
        """Consecutive ranks that are grouped among themselves: one training TP group, or several."""
        return math.lcm(self.train.tp_size, self.replica_size)

    @property
    def micro_dp_size(self) -> int:
        return self.block_size // self.replica_size

    @property
    def num_replicas(self) -> int:
        return self.train.world_size // self.replica_size

    def tp_rank(self, rank: int) -> int:
        return self.rank_in_replica(rank) % self.tp_size

    def dp_rank(self, rank: int) -> int:
        """Which TP group of its replica a rank is in."""
        return self.rank_in_replica(rank) // self.tp_size

    def rank_in_replica(self, rank: int) -> int:
        """A rank's number in its replica, which with expert parallelism is its EP rank."""
        return rank % self.block_size // self.micro_dp_size

    def replica(self, rank: int) -> int:
        """Which replica a rank generates for; replicas of one block are numbered together."""
        return rank // self.block_size * self.micro_dp_size + rank % self.block_size % self.micro_dp_size

    def place(self, rank: int, vocab_multiple: int) -> Place:
        """Where a rank's shards for generation lie: all tensors cut over the rollout TP group, and experts cut, too, or
        dealt out whole over the replica.
        """
        return rollout_place(self.rank_in_replica(rank), self.tp_size, self.ep_size, vocab_multiple)

    def kept_share(self, rank: int, *, of_experts: bool) -> Fraction:
        """The part of its stage's cut weights that a rank has both in training and in generation: of experts, or of
        dense weights that TP cuts. It receives its shard for generation minus this.
        """
        mine, needed = self.train.place(rank, 1), self.place(rank, 1)
        if not of_experts:
            return _common((mine.tp_rank, mine.tp_size), (needed.tp_rank, needed.tp_size))
        experts = _common((mine.ep_rank, mine.ep_size), (needed.ep_rank, needed.ep_size))
        return experts * _common((mine.etp_rank, mine.etp_size), (needed.etp_rank, needed.etp_size))

    @property
    def contains_training(self) -> bool:
        """Whether every rank's training shards, of experts and of other tensors, are inside of those for generation."""
        experts, others = Fraction(1, self.train.ep_size * self.train.expert_tp_size), Fraction(1, self.train.tp_size)
        return all(
            self.kept_share(rank, of_experts=True) == experts and self.kept_share(rank, of_experts=False) == others
            for rank in range(self.train.world_size)
        )

    def tp_groups(self) -> list[list[int]]:
        """Ranks that share all tensors but whole experts, each group ascending, in the order of replicas."""
        size = self.tp_size
        return [replica[i : i + size] for replica in self.replicas() for i in range(0, self.replica_size, size)]

    def replicas(self) -> list[list[int]]:
        """Strided groups that generate together, in replica order, each ascending."""
        k = self.micro_dp_size
        return [block[i::k] for block in self._blocks() for i in range(k)]

    def micro_dp_groups(self) -> list[list[int]]:
        """Consecutive ranks that need the same rollout shard; where t_g divides t their own shards make it up."""
        k = self.micro_dp_size
        return [block[i : i + k] for block in self._blocks() for i in range(0, len(block), k)]

    def _blocks(self) -> list[list[int]]:
        size = self.block_size
        return [list(range(start, start + size)) for start in range(0, self.train.world_size, size)]


def _common(one: tuple[int, int], other: tuple[int, int]) -> Fraction:
    """The common part of the i-th of n equal shares of a whole and of another such share, each given as (i, n)."""
    (i, n), (j, m) = one, other
    return max(Fraction(0), min(Fraction(i + 1, n), Fraction(j + 1, m)) - max(Fraction(i, n), Fraction(j, m)))


def rollout_place(rank: int, tp_size: int, ep_size: int, vocab_multiple: int) -> Place:
    """The place of a rank of a replica, by its number there; ep_size: 1, or the ranks of the replica."""
    tp_rank = rank % tp_size
    if ep_size == 1:
        return Place(tp_rank, tp_size, vocab_multiple, etp_rank=tp_rank, etp_size=tp_size)
    return Place(tp_rank, tp_size, vocab_multiple, ep_rank=rank, ep_size=ep_size)


def rollout_grid(train: TrainGrid, rollout: RolloutConfig) -> RolloutGrid:
    """The generation layout of a pool. Raises ValueError for sizes that do not divide."""
    return RolloutGrid(
        train, rollout.tensor_model_parallel_size, rollout.expert_parallel_size, rollout.attention_dp_size
    )
