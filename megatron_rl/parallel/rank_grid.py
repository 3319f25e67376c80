"""Which rank stands where: pure arithmetic of the training and rollout grids.

Training, in Megatron's order:   rank = tp_rank + tp_size * (dp_rank + dp_size * pp_rank)
Rollout of TP size t_g inside each training TP group of size t, with k = t / t_g:
    micro-DP groups   k consecutive TP ranks, which pool their shards        TP4 -> TP2: [0,1], [2,3]
    rollout TP groups every k-th rank, so each rank's shard lies inside      TP4 -> TP2: [0,2], [1,3]
                      the rollout shard it serves
Each rollout TP group is one replica: it generates for its own prompts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainGrid:
    """The training layout of `world_size` ranks; raises ValueError when tp * pp does not divide the world."""

    world_size: int
    tp_size: int
    pp_size: int

    def __post_init__(self) -> None:
        if self.world_size % (self.tp_size * self.pp_size):
            raise ValueError(f"tp({self.tp_size}) * pp({self.pp_size}) does not divide world_size({self.world_size})")

    @property
    def dp_size(self) -> int:
        return self.world_size // (self.tp_size * self.pp_size)

    def rank(self, tp_rank: int, dp_rank: int, pp_rank: int) -> int:
        return tp_rank + self.tp_size * (dp_rank + self.dp_size * pp_rank)

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp_size

    def dp_rank(self, rank: int) -> int:
        return rank // self.tp_size % self.dp_size

    def pp_rank(self, rank: int) -> int:
        return rank // (self.tp_size * self.dp_size)

    def tp_groups(self) -> list[list[int]]:
        """Ranks that share layers: consecutive."""
        return [list(range(start, start + self.tp_size)) for start in range(0, self.world_size, self.tp_size)]

    def dp_groups(self) -> list[list[int]]:
        """Ranks that hold the same shard and average its gradients."""
        return [
            [self.rank(tp, dp, pp) for dp in range(self.dp_size)]
            for pp in range(self.pp_size)
            for tp in range(self.tp_size)
        ]

    def pp_groups(self) -> list[list[int]]:
        """Ranks that hold the stages of one model replica at one TP coordinate, first stage first."""
        return [
            [self.rank(tp, dp, pp) for pp in range(self.pp_size)]
            for dp in range(self.dp_size)
            for tp in range(self.tp_size)
        ]


@dataclass(frozen=True)
class RolloutGrid:
    """The generation layout over the same ranks; raises ValueError when tp_size does not divide training's."""

    train: TrainGrid
    tp_size: int

    def __post_init__(self) -> None:
        if self.train.tp_size % self.tp_size:
            raise ValueError(f"rollout tp({self.tp_size}) does not divide train tp({self.train.tp_size})")

    @property
    def micro_dp_size(self) -> int:
        return self.train.tp_size // self.tp_size

    @property
    def num_replicas(self) -> int:
        return self.train.world_size // self.tp_size

    def tp_rank(self, rank: int) -> int:
        return self.train.tp_rank(rank) // self.micro_dp_size

    def replica(self, rank: int) -> int:
        """Which replica a rank generates for; replicas of one training TP group are numbered together."""
        block, offset = divmod(rank, self.train.tp_size)
        return block * self.micro_dp_size + offset % self.micro_dp_size

    def tp_groups(self) -> list[list[int]]:
        """Strided groups, in replica order, each ascending."""
        k = self.micro_dp_size
        return [group[i::k] for group in self.train.tp_groups() for i in range(k)]

    def micro_dp_groups(self) -> list[list[int]]:
        """Consecutive TP ranks whose shards together make one rollout shard."""
        k = self.micro_dp_size
        return [group[i : i + k] for group in self.train.tp_groups() for i in range(0, len(group), k)]
