"""The rollout groups: vLLM's parallel state, made in the order of the rollout grid and checked against it.

vLLM makes its own groups while the engine is built, inside the process group that training already initialised, and
always of consecutive ranks. `rank_order` says which rank takes which place in its arithmetic, so that its groups become
the grid's; afterwards they are read once, and a group that is not the grid's is refused.
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

    @property
    def is_replica_collector(self) -> bool:
        """Whether this rank's samples represent its replica: the first of its rollout TP group."""
        return self.tp_rank == 0


def rank_order(grid: RolloutGrid) -> list[int]:
    """The rank to put at each of vLLM's places 0, 1, ... so that consecutive places make the grid's TP groups."""
    return [rank for group in grid.tp_groups() for rank in group]


def read_rollout_groups(grid: RolloutGrid) -> RolloutGroups:
    """vLLM's TP group as the engine built it; every rank may call, after the engine exists.

    Raises RuntimeError when vLLM's group is not the one the grid gives this rank.
    """
    from vllm.distributed import parallel_state as vllm_ps

    rank = dist.get_rank()
    coordinator = vllm_ps.get_tp_group()
    expected = grid.tp_groups()[grid.replica(rank)]
    if list(coordinator.ranks) != expected:
        raise RuntimeError(f"rank {rank}: vLLM's TP group is {coordinator.ranks}, the rollout grid says {expected}")
    return RolloutGroups(grid=grid, rank=rank, ranks=tuple(coordinator.ranks), tp_group=coordinator.device_group)
