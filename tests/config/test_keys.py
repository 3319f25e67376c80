"""Dotted keys of groups that the user names: their values, whom they follow, and what follows them."""

from __future__ import annotations

import pytest

from megatron_rl.config.keys import followed_keys, put, value_of
from megatron_rl.config.load import load_config
from megatron_rl.config.roles import trained_roles

ACTOR_TP = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
FURTHER_TP = "reward_models.helpful.megatron.tensor_model_parallel_size"


@pytest.fixture
def config(tmp_path):
    def config(*overrides: str):
        file = tmp_path / "run.yaml"
        file.write_text("data: {train_files: a, val_files: b}\nactor_rollout_ref: {model: {path: m}}\n")
        return load_config(file, ["reward_models.helpful.model.path=r", *overrides])

    return config


def test_named_groups_follow_like_all_others(config):
    """Until they have a value of their own. Would not catch a leader that follows another in a circle."""
    given = config("pools.gen.nnodes=2")
    assert (value_of(given, "pools.gen.nnodes"), value_of(given, "reward_models.helpful.weight")) == (2, 1.0)
    assert followed_keys(given)[FURTHER_TP] == ACTOR_TP
    assert followed_keys(given)["reward_models.helpful.use_dynamic_bsz"] == "critic.use_dynamic_bsz"
    put(given, ACTOR_TP, 4)
    assert value_of(given, FURTHER_TP) == value_of(given, "critic.megatron.tensor_model_parallel_size") == 4
    put(given, FURTHER_TP, 2)
    put(given, ACTOR_TP, 8)
    assert (value_of(given, FURTHER_TP), value_of(given, ACTOR_TP)) == (2, 8)
    put(given, "pools.gen.nnodes", 3)
    assert given.pools["gen"].nnodes == 3


@pytest.mark.parametrize("key", ["trainer.nodes", "pools.other.nnodes", "reward_models.helpful.lr"])
def test_keys_that_are_not_there(config, key):
    """Would not catch a key that is there by another name."""
    with pytest.raises((AttributeError, KeyError)):
        value_of(config(), key)


def test_trained_roles_come_from_the_table(config):
    """By either name. Would not catch a third role that is trained."""
    assert trained_roles(config()) == {"actor": "m", "critic": "m"}
    assert trained_roles(config("critic.enable=false", "algorithm.adv_estimator=grpo")) == {"actor": "m"}
