"""A gradient or a loss that is not finite on one rank: all of them skip the update, as if it had never been."""

from __future__ import annotations

import math

import pytest
from ranks import run_ranks
from tiny_models import random_batch, run_config, save_qwen2, save_qwen3_moe
from update_traces import bit_equal, clear, everything

from megatron_rl.columns import ACTOR_UPDATE

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

RATES = {
    "actor_rollout_ref__actor__optim__lr": 1e-3,
    "critic__optim__lr": 1e-3,
    "actor_rollout_ref__actor__optim__lr_decay_style": "linear",
    "trainer__total_training_steps": 10,
}


def train_through_nan(worker, sick_field: str | None) -> dict:
    """Of each role a good update, one with NaN on the last DP rank (not if `sick_field` is None), a good update."""
    worker.build("actor")
    worker.build("critic")
    rank, last = worker.groups.dp_rank, worker.groups.grid.dp_size - 1
    first, second = (random_batch(4, seed=rank + step) for step in (0, 10))
    for experience in (first, second):
        experience.add(old_log_probs=experience["rollout_log_probs"])
    found = {}
    for role in ("actor", "critic"):
        trainable, update = worker.roles[role].trainable, worker.roles[role].update
        batches = [experience.read_by(f"{role}.update") for experience in (first, second)]
        update(batches[0])
        before = everything(trainable)
        if sick_field is not None:
            sick = batches[1][:]
            if rank == last:
                sick.flat({"critic": "returns"}.get(role, sick_field))[0] = math.nan
            metrics = update(sick)
            found[f"{role} skipped"] = metrics[f"{role}/skipped_updates"], metrics[f"{role}/empty_updates"]
            found[f"{role} unchanged"] = bit_equal(everything(trainable), before) and clear(trainable)
        metrics = update(batches[1])
        found[role] = everything(trainable), metrics
    return found


def disturbed_and_calm(config, sick_field: str) -> tuple[dict, dict]:
    """`train_through_nan` with NaN and without, by roles built anew."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    return train_through_nan(worker, sick_field), train_through_nan(worker, None)


@pytest.mark.parametrize(
    ("world_size", "pp_size", "sick_field"), [(2, 1, "advantages"), (2, 2, "old_log_probs")], ids=["DP2", "PP2"]
)
def test_a_skipped_update_leaves_no_trace(world_size: int, pp_size: int, sick_field: str, tmp_path) -> None:
    """Weights, moments, schedule and all later metrics are bit for bit those of a run without that update.

    NaN in an advantage, and in an old log-prob, whose NaN loss has a gradient of 0. Would not catch a finite but absurd
    gradient.
    """
    config = run_config(save_qwen2(tmp_path), 1, pp_size, **RATES)
    for ours, theirs in run_ranks(world_size, disturbed_and_calm, config, sick_field):
        for role in ("actor", "critic"):
            assert ours[f"{role} skipped"] == (1.0, 0.0)
            assert ours[f"{role} unchanged"]
            assert bit_equal(ours[role][0], theirs[role][0])
            assert ours[role][1] == theirs[role][1] and ours[role][1][f"{role}/skipped_updates"] == 0
            assert 0 < ours[role][1][f"{role}/grad_norm"] < math.inf


def step_with_nan_in(config, where: str) -> tuple[bool, bool]:
    """(whether the step was skipped, whether nothing is left of it) when rank 1 alone holds a NaN there."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    trainable = worker.roles["actor"].trainable
    before = everything(trainable)
    batch = random_batch(4)
    batch.add(old_log_probs=batch["advantages"])
    worker.roles["actor"].compute_gradients(batch.read_by(ACTOR_UPDATE))
    if worker.groups.rank == 1:
        expert = where == "an expert"
        buffers = trainable.chunks[-1].expert_parallel_buffers if expert else trainable.param_buffers
        buffers[-1].grad_data[7] = math.nan
    skipped = trainable.step().skipped
    return skipped, bit_equal(everything(trainable), before) and clear(trainable)


def test_nan_in_any_chunk_skips_on_every_rank(tmp_path) -> None:
    """PP2 with two chunks a stage; would not catch a NaN in a buffer that DDP keeps elsewhere."""
    keys = {"actor_rollout_ref__actor__megatron__virtual_pipeline_model_parallel_size": 2}
    config = run_config(save_qwen2(tmp_path), 1, 2, **keys)
    assert run_ranks(2, step_with_nan_in, config, "the last chunk") == [(True, True)] * 2


def test_nan_in_an_expert_skips_on_every_rank(tmp_path) -> None:
    """DP2 x EP2, where no other rank holds that expert.

    Would not catch NaN in an activation, which reaches no weight.
    """
    config = run_config(
        save_qwen3_moe(tmp_path), 1, 1, actor_rollout_ref__actor__megatron__expert_model_parallel_size=2
    )
    assert run_ranks(2, step_with_nan_in, config, "an expert") == [(True, True)] * 2
