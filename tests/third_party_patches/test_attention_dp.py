"""Data-parallel groups of vLLM inside of a world, and uneven rows between their ranks on CPUs."""

from __future__ import annotations

import os

import pytest
import torch
from ranks import run_ranks

pytestmark = pytest.mark.dist


def check_attention_dp():
    """Two data-parallel groups of two ranks: (data-parallel rank, gathered rows, this rank's sums); None: an error."""
    import torch.distributed as dist
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as vllm_ps

    from third_party_patches.vllm import cpu_uneven_tokens, rank_order, several_dp_groups, shm_group_name, shm_lifetime

    for needed in (shm_group_name, shm_lifetime, rank_order):
        needed.PATCH.apply()
    os.environ["VLLM_DIST_IDENT"] = "//"
    dist.init_process_group("gloo")

    def configured():
        with rank_order.using_rank_order([0, 2, 1, 3]):
            return ParallelConfig(data_parallel_size=2, distributed_executor_backend="external_launcher")

    def exchanged(group):
        rows = torch.full((1 + group.rank_in_group, 2), float(dist.get_rank()))
        try:
            gathered = group.all_gatherv([rows], dim=0, sizes=[1, 2])[0]
            return gathered[:, 0].tolist(), group.reduce_scatterv(gathered, dim=0, sizes=[1, 2])[:, 0].tolist()
        except NotImplementedError:
            return None

    try:
        without = configured().data_parallel_rank
    except ValueError:
        without = None
    several_dp_groups.PATCH.apply()
    several_dp_groups.PATCH.apply()
    parallel = configured()
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)), rank_order.using_rank_order([0, 2, 1, 3]):
        vllm_ps.init_distributed_environment(4, dist.get_rank(), "env://", dist.get_rank(), "gloo")
        vllm_ps.initialize_model_parallel()
        raised = exchanged(vllm_ps.get_dp_group())
        cpu_uneven_tokens.PATCH.apply()
        found = exchanged(vllm_ps.get_dp_group())
        vllm_ps.destroy_model_parallel()
    return without, raised, parallel.data_parallel_rank, found


def test_attention_dp():
    """Without: ranks 2 and 3 have no place, and no rows are exchanged. With: ranks 0 and 2, and 1 and 3, exchange rows
    of two lengths. Would not catch sums on a GPU, which are vLLM's own.
    """
    found = run_ranks(4, check_attention_dp, timeout=100)
    without, raised, ranks, rows = zip(*found, strict=True)
    assert without == (0, 1, None, None) and raised == (None,) * 4
    assert ranks == (0, 0, 1, 1)
    assert rows == (([0, 2, 2], [0]), ([1, 3, 3], [2]), ([0, 2, 2], [4, 4]), ([1, 3, 3], [6, 6]))
