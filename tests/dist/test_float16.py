"""A float16 actor: its loss is scaled, an overflow skips a step and halves the scale on all ranks alike."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tiny_models import random_batch, run_config, save_qwen2
from update_traces import bit_equal, clear, everything

from megatron_rl.columns import ACTOR_UPDATE, SCORING

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

FIRST, TOO_LARGE = 2**16, 2**40


def two_updates(config) -> dict:
    """Metrics of an update that overflows, where the loss is scaled, and of one that is taken; and what they left."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    actor = worker.roles["actor"]
    trainable, scaling = actor.trainable, actor.trainable.loss_scaling
    experience = random_batch(4, seed=worker.groups.dp_rank)
    experience.add(old_log_probs=actor.log_probs(experience.read_by(SCORING))["old_log_probs"])
    batch = experience.read_by(ACTOR_UPDATE)
    found = {"first": scaling.scale}
    if scaling.scale:
        trainable.adam.create()
        before = everything(trainable)
        scaling.set(TOO_LARGE, 7)
        found["overflow"] = actor.update(batch)
        found["unchanged"] = bit_equal(everything(trainable), before) and clear(trainable)
        found["halved"] = scaling.scale, scaling.good_steps
        scaling.set(FIRST, 0)
    found["taken"] = actor.update(batch)
    found["state"] = actor.checkpoint.state
    found["weights"] = torch.cat([master.detach().float().flatten() for master in trainable.optimizer_state()]).norm()
    return found


def test_overflow_and_the_update_after_it(tmp_path) -> None:
    """DP2: nothing moves, the scale is halved; then loss, gradient norm and state are those of float32, unscaled.

    Would not catch an activation that overflows in a real model.
    """
    path, keys = save_qwen2(tmp_path), {"actor_rollout_ref__actor__optim__lr": 1e-3}
    exact = run_ranks(2, two_updates, run_config(path, 1, 1, **keys))[0]
    assert exact["first"] == 0 and "actor/loss_scale" not in exact["taken"] and exact["state"].loss_scale == 0
    ranks = run_ranks(
        2, two_updates, run_config(path, 1, 1, **keys, actor_rollout_ref__actor__megatron__dtype="float16")
    )
    for found in ranks:
        assert found["first"] == FIRST
        assert found["overflow"]["actor/skipped_updates"] == 1 and found["overflow"]["actor/loss_scale"] == TOO_LARGE
        assert found["unchanged"] and found["halved"] == (TOO_LARGE // 2, 0)
        assert found["taken"]["actor/skipped_updates"] == 0 and found["taken"]["actor/loss_scale"] == FIRST
        assert found["taken"]["actor/grad_norm"] == pytest.approx(exact["taken"]["actor/grad_norm"], rel=2e-2)
        assert found["taken"]["actor/pg_loss"] == pytest.approx(exact["taken"]["actor/pg_loss"], abs=2e-3)
        assert (found["state"].loss_scale, found["state"].good_steps, found["state"].adam_step) == (FIRST, 1, 1)
