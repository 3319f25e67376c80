"""The rollout groups: vLLM's parallel state, made in the order of the rollout grid and checked against it.

vLLM makes its groups while the engine is built, in the process group that training has initialised, and always of
consecutive ranks. `rank_order` maps its places to ranks so that its groups equal the grid's. They are read once
afterwards, and a group that differs from the grid's raises.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from megatron_rl.parallel.rank_grid import RolloutGrid


@dataclass(frozen=True)
class RolloutGroups:
    """One rank's place in the rollout grid; `ranks` are the members of vLLM's own `tp_group`."""

    grid: RolloutGrid
    rank: int
    ranks: tuple[int, ...]
    tp_group: dist.ProcessGroup

    @property
    def replica(self) -> int:
        return self.grid.replica(self.rank)

    @property
    def tp_rank(self) -> int:
        return self.grid.tp_rank(self.rank)


def rank_order(grid: RolloutGrid) -> list[int]:
    """The rank to put at each of vLLM's places 0, 1, ... so that consecutive places make the grid's TP groups."""
    return [rank for group in grid.tp_groups() for rank in group]


def read_rollout_groups(grid: RolloutGrid) -> RolloutGroups:
    """vLLM's TP group as the engine built it; every rank may call, after the engine exists.

    Raises RuntimeError if vLLM's group differs from the grid's group of this rank.
    """
    from vllm.distributed import parallel_state as vllm_ps

    rank = dist.get_rank()
    coordinator = vllm_ps.get_tp_group()
    expected = grid.tp_groups()[grid.replica(rank)]
    if list(coordinator.ranks) != expected:
        raise RuntimeError(f"rank {rank}: vLLM's TP group is {coordinator.ranks}, the rollout grid says {expected}")
    return RolloutGroups(grid=grid, rank=rank, ranks=tuple(coordinator.ranks), tp_group=coordinator.device_group)
