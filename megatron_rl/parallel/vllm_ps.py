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
    """One rank's place in the rollout grid; `ranks` are the members of vLLM's own `tp_group`.

    dp_group: the ranks with this `tp_rank` in the replica's TP groups, over gloo.
    """

    grid: RolloutGrid
    rank: int
    ranks: tuple[int, ...]
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup

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
    """vLLM's TP and DP groups as the engine built them; every rank may call, after the engine exists.

    Raises RuntimeError if one of them differs from the grid's group of this rank.
    """
    from vllm.distributed import parallel_state as vllm_ps

    rank = dist.get_rank()
    replica, tp, dp = grid.replicas()[grid.replica(rank)], vllm_ps.get_tp_group(), vllm_ps.get_dp_group()
    place = grid.rank_in_replica(rank)
    first = place // grid.tp_size * grid.tp_size
    expected = {"TP": replica[first : first + grid.tp_size], "DP": replica[place % grid.tp_size :: grid.tp_size]}
    for name, coordinator in {"TP": tp, "DP": dp}.items():
        if list(coordinator.ranks) != expected[name]:
            raise RuntimeError(
                f"rank {rank}: vLLM's {name} group is {coordinator.ranks}, in the rollout grid it is {expected[name]}"
            )
    return RolloutGroups(grid, rank, tuple(tp.ranks), tp.device_group, dp.cpu_group)
