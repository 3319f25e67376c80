"""A NaN on one rank stops the update on all of them, before any weight changes."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import run_ranks
from tiny_models import random_experience, run_config, save_qwen2, save_qwen3_moe

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def update_with_nan(config) -> tuple[str, bool, float]:
    """(what update raised, whether the weights are bit-equal, the gradient norm of a healthy update afterwards)."""
    from megatron_rl.workers.rank_worker import RankWorker

    worker = RankWorker(config)
    worker.build_actor()
    weights = worker.actor.trainable.param_buffers[0].param_data
    before = weights.clone()
    batch = random_experience(4, seed=worker.groups.dp_rank)
    batch.old_log_probs = worker.compute_log_probs(batch.sequences()).scores
    healthy = batch.actor_batch()
    sick = healthy.clone()
    if worker.groups.dp_rank == 1:
        sick.advantages.values()[0] = math.nan
    try:
        worker.update_actor(sick)
        raised = "nothing"
    except FloatingPointError as error:
        raised = str(error)
    unchanged = torch.equal(weights, before)
    return raised, unchanged, worker.update_actor(healthy)["actor/grad_norm"]


def test_nan_stops_every_rank(tmp_path) -> None:
    """DP2, NaN on rank 1 only; would not catch a finite but absurd gradient."""
    for raised, unchanged, grad_norm in run_ranks(2, update_with_nan, run_config(save_qwen2(tmp_path), 1, 1)):
        assert "NaN" in raised
        assert unchanged
        assert 0 < grad_norm < math.inf


def step_with_nan_in_last_chunk(config) -> tuple[str, bool]:
    """(what the step raised when rank 0 holds a NaN in its last chunk only, whether all weights are bit-equal)."""
    from megatron_rl.workers.rank_worker import RankWorker

    worker = RankWorker(config)
    worker.build_actor()
    buffers = worker.actor.trainable.param_buffers
    before = [buffer.param_data.clone() for buffer in buffers]
    batch = random_experience(4)
    batch.old_log_probs = batch.advantages
    worker.actor.compute_gradients(batch.actor_batch())
    if worker.groups.rank == 0:
        buffers[-1].grad_data[0] = math.nan
    try:
        worker.actor.trainable.step()
        raised = "nothing"
    except FloatingPointError as error:
        raised = str(error)
    return raised, all(torch.equal(buffer.param_data, old) for buffer, old in zip(buffers, before, strict=True))


def test_nan_in_any_chunk_stops_every_rank(tmp_path) -> None:
    """PP2 with two chunks a stage; would not catch a NaN in a buffer that DDP keeps elsewhere."""
    keys = {"actor_rollout_ref__actor__megatron__virtual_pipeline_model_parallel_size": 2}
    for raised, unchanged in run_ranks(2, step_with_nan_in_last_chunk, run_config(save_qwen2(tmp_path), 1, 2, **keys)):
        assert "NaN" in raised
        assert unchanged


def step_with_nan_in_an_expert(config) -> str:
    """What the step raised after one element of rank 1's expert gradients became NaN."""
    from megatron_rl.workers.rank_worker import RankWorker

    worker = RankWorker(config)
    worker.build_actor()
    trainable = worker.actor.trainable
    if worker.groups.dp_rank == 1:
        trainable.chunks[0].expert_parallel_buffers[0].grad_data[7] = math.nan
    try:
        trainable.step()
    except FloatingPointError as error:
        return str(error)
    return "nothing"


def test_nan_in_an_expert_stops_every_rank(tmp_path) -> None:
    """DP2 x EP2, where no other rank holds that expert.

    Would not catch NaN in an activation, which reaches no weight.
    """
    config = run_config(
        save_qwen3_moe(tmp_path), 1, 1, actor_rollout_ref__actor__megatron__expert_model_parallel_size=2
    )
    for raised in run_ranks(2, step_with_nan_in_an_expert, config):
        assert "NaN" in raised
