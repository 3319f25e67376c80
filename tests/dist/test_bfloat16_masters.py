"""The optimizer's float32 masters of a bfloat16 model start from the weights of the folder."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tiny_models import run_config, save_qwen2

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def largest_difference(config) -> float:
    """Between a master and the parameter that it updates."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    [optimizer] = worker.roles["actor"].trainable.optimizer.chained_optimizers
    masters, weights = (
        torch.cat([shard.detach().float().flatten() for group in groups for shard in group])
        for groups in (optimizer.shard_fp32_from_float16_groups, optimizer.shard_float16_groups)
    )
    assert masters.abs().max() > 0
    return float((masters - weights).abs().max())


def test_masters_are_the_weights_that_were_read(tmp_path) -> None:
    """A master made before the weights are read would undo them at the first step. Would not catch a wrong weight."""
    path = save_qwen2(tmp_path)
    assert run_ranks(
        2, largest_difference, run_config(path, 1, 1, actor_rollout_ref__actor__megatron__dtype="bfloat16")
    ) == [0.0, 0.0]
