"""Which runs take the update's own log-probs for the old ones."""

from __future__ import annotations

from functools import reduce

import pytest

from megatron_rl.config.algorithms import is_on_policy, scores_old_log_probs
from megatron_rl.config.schema import RunConfig

CORRECTION = "algorithm.rollout_correction"
GRPO: dict[str, object] = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 16,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
}


def config(changes: dict[str, object]) -> RunConfig:
    """A run with one update a step, but for changes by dotted key."""
    found = RunConfig()
    for key, value in (GRPO | changes).items():
        *groups, name = key.split(".")
        group = reduce(getattr, groups, found)
        assert hasattr(group, name), key
        setattr(group, name, value)
    return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"actor_rollout_ref.actor.ppo_mini_batch_size": 32}, True),
        ({"algorithm.adv_estimator": "gae"}, True),
        ({"actor_rollout_ref.actor.use_kl_loss": True}, True),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}, True),
        ({"trainer.critic_warmup": 1}, True),
        ({"actor_rollout_ref.actor.ppo_mini_batch_size": 15}, False),
        ({"actor_rollout_ref.actor.ppo_epochs": 2}, False),
        ({"algorithm.use_kl_in_reward": True}, False),
        ({"algorithm.adv_estimator": "optimal_token_baseline"}, False),
        ({"algorithm.adv_estimator": "tir_optimal_token_baseline"}, False),
        ({"algorithm.adv_estimator": "from_a_file"}, False),
        ({"actor_rollout_ref.actor.policy_loss.top_entropy_quantile": 0.2}, False),
        ({"trainer.critic_warmup": 2}, False),
        ({"trainer.rollout_ahead": 1}, False),
        ({"async_training.partial_rollout": True}, False),
        ({f"{CORRECTION}.rollout_is": "token"}, False),
        ({f"{CORRECTION}.rollout_rs": "token_k1"}, False),
        ({f"{CORRECTION}.rollout_token_veto_threshold": 0.0}, False),
        ({f"{CORRECTION}.bypass_mode": True}, False),
    ],
)
def test_only_where_nobody_reads_them_before_the_only_update(changes: dict, expected: bool) -> None:
    """Every condition by itself. Would not catch a reader of old log-probs that the rule does not know of."""
    run = config(changes)
    assert is_on_policy(run) is expected
    bypasses = f"{CORRECTION}.bypass_mode" in changes
    assert scores_old_log_probs(run) is (not expected and not bypasses)
