"""The training groups: the only caller of megatron-core's `initialize_model_parallel`.

Everything else receives a `TrainGroups`, so that no code depends on Megatron's globals by accident.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from megatron_rl.parallel.rank_grid import TrainGrid


@dataclass(frozen=True)
class TrainGroups:
    """One rank's place in the training grid and the process groups it belongs to.

    exchange_group: the ranks that exchange weights for generation (`TrainGrid.exchange_groups`).
    pack_groups: number of ranks that share a pack, above 1 -> the group with which this rank shares such packs.
    """

    grid: TrainGrid
    rank: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    exchange_group: dist.ProcessGroup
    pack_groups: Mapping[int, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def row_group(self) -> dist.ProcessGroup:
        """The ranks that together run every row once: data-parallel ranks, or context-parallel ranks with dynamic
        context parallelism.
        """
        return self.dp_group if self.grid.most_sharing is None else self.cp_group

    @property
    def tp_rank(self) -> int:
        return self.grid.tp_rank(self.rank)

    @property
    def dp_rank(self) -> int:
        return self.grid.dp_rank(self.rank)

    @property
    def cp_rank(self) -> int:
        return self.grid.cp_rank(self.rank)

    @property
    def pp_rank(self) -> int:
        return self.grid.pp_rank(self.rank)

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.grid.pp_size - 1

    @property
    def is_dp_collector(self) -> bool:
        """Whether this rank's answer counts for its data-parallel rank: tp_rank 0 and cp_rank 0 of the last stage."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0


def initialize_mpu(
    grid: TrainGrid, seed: int, vpp_size: int = 1, timeout: timedelta = default_pg_timeout
) -> TrainGroups:
    """Create Megatron's groups and RNG tracker; every rank must call, once, after `init_process_group`.

    vpp_size: model chunks per stage, which decides the pipeline schedule of every role.
    timeout: of every collective, rounded up to minutes for Megatron's.
    Raises RuntimeError if Megatron's place of this rank differs from the grid's.
    """
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=grid.tp_size,
        pipeline_model_parallel_size=grid.pp_size,
        # With a size of 1 Megatron would still take its interleaved schedule.
        virtual_pipeline_model_parallel_size=vpp_size if vpp_size > 1 else None,
        context_parallel_size=grid.cp_size,
        expert_model_parallel_size=grid.ep_size,
        expert_tensor_parallel_size=grid.expert_tp_size,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=math.ceil(timeout.total_seconds() / 60),
    )
    tensor_parallel.random.model_parallel_cuda_manual_seed(seed)
    exchange_group, _ = dist.new_subgroups_by_enumeration(grid.exchange_groups(), timeout=timeout)
    pack_groups = {
        size: dist.new_subgroups_by_enumeration(grid.pack_groups(size), timeout=timeout)[0]
        for size in grid.pack_sizes
        if size > 1
    }
    groups = TrainGroups(
        grid=grid,
        rank=dist.get_rank(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        exchange_group=exchange_group,
        pack_groups=pack_groups,
    )
    megatrons = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )
    place = grid.place(groups.rank, vocab_multiple=1)
    ours = (groups.tp_rank, groups.cp_rank, groups.dp_rank, groups.pp_rank, place.ep_rank, place.etp_rank)
    if megatrons != ours:
        raise RuntimeError(
            f"rank {groups.rank}: Megatron places it at (tp, cp, dp, pp, ep, etp) {megatrons}, the grid at {ours}"
        )
    return groups
