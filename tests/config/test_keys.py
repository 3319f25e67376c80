"""Dotted keys of groups that the user names: their values, whom they follow, and what follows them."""

from __future__ import annotations

import pytest

from megatron_rl.config.keys import default_of, followed_keys, in_named_group, is_key, put, type_of, value_of
from megatron_rl.config.load import load_config
from megatron_rl.config.roles import trained_roles
from megatron_rl.errors import ConfigError

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


TEACHERS = "distillation.teacher_models"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (TEACHERS, (TEACHERS, "", "")),
        (f"{TEACHERS}.math", (TEACHERS, "math", "")),
        (f"{TEACHERS}.math.megatron.dtype", (TEACHERS, "math", "megatron.dtype")),
        ("pools.gen.nnodes", ("pools", "gen", "nnodes")),
        (f"{TEACHERS}_of_mine.math", None),
        ("distillation.enabled", None),
    ],
)
def test_where_the_users_names_begin(key, expected):
    """Below a dotted key as below a whole one. Would not catch a name with a dot, which is a group below it."""
    assert in_named_group(key) == expected


def test_named_groups_below_a_dotted_key_have_leaders_and_types(config):
    """As those below a whole one: values, leaders, defaults and types. Would not catch a leader in the same group."""
    given = config(f"{TEACHERS}.math.model_path=t", f"{TEACHERS}.math.key=3", f"{ACTOR_TP}=4")
    key = f"{TEACHERS}.math.megatron.tensor_model_parallel_size"
    assert (value_of(given, f"{TEACHERS}.math.key"), value_of(given, key)) == ("3", 4)
    assert followed_keys(given)[key] == ACTOR_TP
    assert default_of(f"{TEACHERS}.any.max_prompt_length") == default_of("data.max_prompt_length")
    assert type_of(key) is int and is_key(key) and not is_key(f"{TEACHERS}.math.lr")
    put(given, ACTOR_TP, 2)
    assert value_of(given, key) == 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("math.model_pth=x", f"unknown key {TEACHERS}.math.model_pth .*did you mean: {TEACHERS}.math.model_path=x"),
        ("math=3", f"it is a group of keys, not a value; set {TEACHERS}.math.key"),
        ("math.log_prob_micro_batch_size_per_gpu=many", "must be of type int"),
        ("my.math.model_path=x", f"unknown key {TEACHERS}.my.math.model_path"),
    ],
)
def test_wrong_keys_below_the_users_names(config, override, expected):
    """Would not catch a misspelled name, which is another group."""
    with pytest.raises(ConfigError, match=expected):
        config(f"{TEACHERS}.{override}")
