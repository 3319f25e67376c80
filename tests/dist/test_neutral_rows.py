"""A data-parallel rank that only has filler rows takes part in the update and changes nothing about it."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tiny_models import random_batch, run_config, save_qwen3_moe

from megatron_rl.columns import ACTOR_UPDATE, CRITIC_UPDATE

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]


def update_one_row(config) -> tuple[dict, dict]:
    """Metrics of one actor and one critic update on a single row, which data-parallel rank 0 has."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("critic")
    row = random_batch(3)[:1]
    row.add(old_log_probs=row["advantages"])
    actor_batch, critic_batch = row.read_by(ACTOR_UPDATE), row.read_by(CRITIC_UPDATE)
    if worker.groups.dp_rank > 0:
        actor_batch, critic_batch = actor_batch.neutral(), critic_batch.neutral()
    metrics = worker.roles["actor"].update(actor_batch), worker.roles["critic"].update(critic_batch)
    assert torch.isfinite(worker.roles["actor"].trainable.param_buffers[0].param_data).all()
    return metrics


def test_filler_rows_contribute_nothing_and_meet_experts(tmp_path) -> None:
    """DP2 x EP2 with one real row against one process: the rank without one answers the other's tokens. Would not catch
    filler that skews the controller's metrics, nor lost time.
    """
    path = save_qwen3_moe(tmp_path)
    [alone] = run_ranks(1, update_one_row, run_config(path, 1, 1))
    config = run_config(path, 1, 1, actor_rollout_ref__actor__megatron__expert_model_parallel_size=2)
    split = run_ranks(2, update_one_row, config)
    for role in (0, 1):
        assert alone[role]
        for rank in split:
            assert rank[role] == pytest.approx(alone[role], rel=1e-5, abs=1e-7)
