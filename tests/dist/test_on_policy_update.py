"""An update that takes its own log-probs for the old ones does what one after a pass for old log-probs does.

Why, bit for bit: both run the same forward with the same weights on the same blocks, so the old log-probs are the new
ones in value. That holds on each rank; layouts change where they come from: other rows under DP, the last chunk under
VPP. TP changes what a log-prob is made of, in both alike, and is left out.
"""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tiny_models import random_batch, run_config, save_qwen2

from megatron_rl.columns import ACTOR_UPDATE, SCORING

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_ROWS = 7
VPP2 = {"actor_rollout_ref__actor__megatron__virtual_pipeline_model_parallel_size": 2}
LAYOUTS = {
    "DP2": (2, 1, 1, {}),
    "PP2, VPP2": (2, 1, 2, VPP2),
    "dynamic": (1, 1, 1, {"actor_rollout_ref__actor__use_dynamic_bsz": True}),
}


def both_ways(config, num_rows: int) -> tuple[dict, dict]:
    """`updated` by own log-probs, and after a pass, each by an actor built anew."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    return updated(worker, True, num_rows), updated(worker, False, num_rows)


def updated(worker, on_policy: bool, num_rows: int) -> dict:
    """Metrics, log-probs of this rank's rows, and this rank's weights, after one update with a KL in the loss."""
    from megatron_rl.roles.model_source import named_parameters

    worker.build("actor")
    where, actor = worker.coordinates(), worker.roles["actor"]
    rows = torch.arange(num_rows).tensor_split(where.dp_size)[where.dp_rank]
    mine = random_batch(num_rows)[rows]
    mine.add(ref_log_probs=mine["rollout_log_probs"])
    if on_policy:
        metrics, own = actor.update_on_policy(mine.read_by(ACTOR_UPDATE))
    else:
        own = actor.log_probs(mine.read_by(SCORING))
        # Stages before the last read none, but blocks have the field on all of them.
        mine.add(old_log_probs=mine["advantages"] if own is None else own["old_log_probs"])
        metrics = actor.update(mine.read_by(ACTOR_UPDATE))
    log_probs = None if own is None else [row.tolist() for row in own["old_log_probs"].unbind()]
    weights = {name: p.detach().clone() for name, p in named_parameters(actor.trainable.models).items()}
    return {"metrics": metrics, "log_probs": log_probs, "weights": weights}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_qwen2(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_with_a_pass_for_old_log_probs(layout, model_path) -> None:
    """Bit for bit: metrics, log-probs in the order of the rows, and weights after Adam.

    Both cut their passes alike here. Would not catch a wrong loss that both have.
    """
    world_size, tp_size, pp_size, changes = LAYOUTS[layout]
    changes = changes | {"actor_rollout_ref__actor__use_kl_loss": True, "actor_rollout_ref__actor__kl_loss_coef": 0.1}
    config = run_config(model_path, tp_size, pp_size, **changes)
    config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz = config.actor_rollout_ref.actor.use_dynamic_bsz
    ours, theirs = zip(*run_ranks(world_size, both_ways, config, NUM_ROWS), strict=True)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["metrics"] == other["metrics"] and mine["metrics"]["actor/grad_norm"] > 0.01
        assert mine["log_probs"] == other["log_probs"]
        assert all(torch.equal(weight, other["weights"][name]) for name, weight in mine["weights"].items())
    assert ours[-1]["metrics"]["actor/ppo_kl"] == 0.0 and ours[-1]["metrics"]["actor/kl_loss"] > 0
    assert [len(row) for row in ours[-1]["log_probs"]] == random_batch(NUM_ROWS).num_sampled.tolist()[
        -len(ours[-1]["log_probs"]) :
    ]


def test_a_rank_without_rows_runs_along(model_path) -> None:
    """DP2 with a neutral row on one rank updates as one process does. Would not catch a row that adds below 1e-6."""
    config = run_config(model_path, 1, 1)
    [(alone, _)] = run_ranks(1, both_ways, config, 1)
    ranks = run_ranks(2, updated_with_a_neutral_row, config)
    for rank in ranks:
        for name, weight in alone["weights"].items():
            # Adam's first step is of the size of the learning rate whatever the gradient's is, so rounding shows.
            assert (rank["weights"][name] - weight).abs().max() <= 2.1e-6, name
        assert rank["metrics"]["actor/grad_norm"] == pytest.approx(alone["metrics"]["actor/grad_norm"], rel=1e-5)
    assert ranks[0]["log_probs"][0] == pytest.approx(alone["log_probs"][0], abs=1e-6)
    assert ranks[1]["log_probs"] == [[]]


def updated_with_a_neutral_row(config) -> dict:
    """As `updated`; the only row is on data-parallel rank 0."""
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters

    worker = RankHost(config)
    worker.build("actor")
    batch = random_batch(1).read_by(ACTOR_UPDATE)
    if worker.coordinates().dp_rank == 1:
        batch = batch.neutral()
        assert "old_log_probs" not in batch
    metrics, own = worker.roles["actor"].update_on_policy(batch)
    weights = named_parameters(worker.roles["actor"].trainable.models)
    return {
        "metrics": metrics,
        "log_probs": [row.tolist() for row in own["old_log_probs"].unbind()],
        "weights": {name: p.detach().clone() for name, p in weights.items()},
    }
