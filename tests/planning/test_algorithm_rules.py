"""Rules of the algorithm's keys: names, the user's own files, and what each choice needs."""

from __future__ import annotations

import pytest
from model_folders import problems

from megatron_rl.config.algorithms import uses_critic, uses_reference
from megatron_rl.config.declarations import ESTIMATORS, POLICY_LOSSES
from megatron_rl.config.roles import trained_roles
from megatron_rl.planning.algorithm_rules import algorithm_problems
from megatron_rl.planning.batch_arithmetic import group_notes
from megatron_rl.planning.feature_checks import feature_problems
from megatron_rl.planning.resume_rules import configured_models

OWN = "def mine(samples, config):\n    return samples.rewards, samples.rewards\n\nclass NotAFunction:\n    pass\n"
N = "actor_rollout_ref.rollout.n"


def test_built_in_names(config):
    """Every estimator and loss passes with what it needs. Would not catch one that nothing implements."""
    config.actor_rollout_ref.rollout.n = 4
    config.algorithm.gdpo_reward_keys, config.algorithm.use_kl_in_reward = ["acc"], False
    loss = config.actor_rollout_ref.actor.policy_loss
    loss.dro_beta = 0.1
    for name in ESTIMATORS:
        config.algorithm.adv_estimator = name
        assert list(algorithm_problems(config)) == []
    for loss.loss_mode in POLICY_LOSSES.keys() - {"bypass_mode"}:
        assert list(algorithm_problems(config)) == []
    config.algorithm.adv_estimator = "remax"  # it needs no pass of the trainer
    config.algorithm.rollout_correction.bypass_mode = True
    for loss.loss_mode in POLICY_LOSSES:
        assert list(algorithm_problems(config)) == []


def test_an_overlong_penalty_is_a_component(config):
    """Of gdpo, and with weights of as many numbers as before. Would not catch a component that nothing fills."""
    algorithm, overlong = config.algorithm, config.reward_model.overlong_buffer
    algorithm.adv_estimator, algorithm.use_kl_in_reward, config.actor_rollout_ref.rollout.n = "gdpo", False, 2
    algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights = ["score", "form"], [1.0, 0.5]
    overlong.enable, overlong.len = True, 4
    (problem,) = feature_problems(config)
    found = ["score", "form", "overlong_reward"]
    assert problem.nearest == {"algorithm.gdpo_reward_keys": found, "algorithm.gdpo_reward_weights": None}
    algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights = found, None
    assert list(algorithm_problems(config)) == [] and feature_problems(config) == []


def test_refused_names_list_the_known_ones(config, tmp_path):
    """Without a file, and with one that has other functions. Would not catch a function made at run time."""
    config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode = "groo", "gsp"
    estimator, loss = map(str, algorithm_problems(config))
    assert estimator.startswith(
        "algorithm.adv_estimator=groo must be one of gae, reinforce_plus_plus, remax, gigpo, grpo, grpo_vectorized, "
    )
    assert "custom_adv_estimator.path=null; did you mean: grpo" in estimator
    assert (
        "policy_loss.loss_mode=gsp must be one of clip_cov, kl_cov, " in loss
        and ", dro, geo_mean, vespo, or a function of the file" in loss
    )
    config.algorithm.adv_estimator = "grpo_passq"
    assert f"did you mean: algorithm.adv_estimator=grpo_passk {N}=2" in str(next(iter(algorithm_problems(config))))
    (tmp_path / "own.py").write_text(OWN)
    config.actor_rollout_ref.actor.policy_loss.loss_mode = "vanilla"
    config.algorithm.adv_estimator, config.algorithm.custom_adv_estimator.path = "min", str(tmp_path / "own.py")
    (problem,) = map(str, algorithm_problems(config))
    assert "tir_optimal_token_baseline, mine, or a function" in problem and problem.endswith("did you mean: mine")


def test_functions_of_the_users(config, tmp_path):
    """Found without running the file, which would raise. Would not catch a wrong signature; loading it does."""
    (tmp_path / "own.py").write_text(OWN + "raise RuntimeError\n")
    config.algorithm.adv_estimator, config.algorithm.custom_adv_estimator.path = "mine", str(tmp_path / "own.py")
    assert problems(config) == []
    config.algorithm.adv_estimator = "gae"
    (problem,) = problems(config)
    assert "own.py is of no use" in problem and problem.endswith("try: null; other names: mine")


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, "it does not exist; did you mean: "), ("def (", "must be a Python file: invalid syntax")],
)
def test_files_that_cannot_be_read(config, tmp_path, text, expected):
    """Absent, and no Python; the absent one has a neighbour. Would not catch a file that only fails when it runs."""
    if text is not None:
        (tmp_path / "own.py").write_text(text)
    loss = config.actor_rollout_ref.actor.policy_loss
    loss.loss_mode, loss.custom.path = "mine", str(tmp_path / "own.py")
    (problem,) = problems(config)
    assert problem.startswith("actor_rollout_ref.actor.policy_loss.custom.path=") and expected in problem


def test_groups_of_one(config):
    """Allowed with a note where a lone answer has an advantage; Pass@k, which is about the second best, needs two.

    Would not catch a group that is cut by a mini-batch, which does no harm.
    """
    for name in ("grpo", "rloo", "opo", "gpg", "optimal_token_baseline", "reinforce_plus_plus_baseline"):
        config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n = name, 1
        assert problems(config) == []
        (note,) = group_notes(config)
        assert f"adv_estimator={name} compares" in note and "rollout.n=1: a group of one has no baseline" in note
        config.actor_rollout_ref.rollout.n = 2
        assert group_notes(config) == []
    config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n = "reinforce_plus_plus", 1
    assert group_notes(config) == []
    config.custom_reward_function.per_group = True
    assert "per_group=true compares the samples of a prompt" in "".join(group_notes(config))
    config.custom_reward_function.per_group = False
    config.algorithm.adv_estimator = "grpo_passk"
    (problem,) = problems(config)
    assert problem.startswith("actor_rollout_ref.rollout.n=1 must be >= 2: algorithm.adv_estimator=grpo_passk compares")
    assert problem.endswith("try: 2")


def test_rules_between_keys(config):
    """Each broken alone. Would not catch two that only clash together."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    actor.policy_loss.loss_mode = "dro"
    assert ["try: 0.1" in problem for problem in problems(config)] == [True]
    actor.policy_loss.loss_mode = "vanilla"

    correction.rollout_rs, correction.rollout_is_threshold = "token", 0.5
    (problem,) = problems(config)
    assert "rollout_is_threshold=0.5 must be > 1, because the lower bound is 1 / threshold; try: " in problem
    correction.rollout_rs_threshold_lower = 0.9
    (problem,) = problems(config)
    assert "rollout_is_threshold=0.5 must be >= the lower bound, which is 0.9; try: " in problem
    assert problem.endswith("=0.5_2.0")
    correction.rollout_rs_threshold = 2.0
    assert problems(config) == []

    config.reward_model.overlong_buffer.enable = True
    (problem,) = problems(config)
    assert problem.endswith("overlong_buffer.len=0 must be >= 1 and <= data.max_response_length=48; try: 1")
    config.reward_model.overlong_buffer.enable = False

    config.data.gen_batch_size = 128
    (problem,) = problems(config)
    assert problem.startswith("data.gen_batch_size=128 must equal data.train_batch_size=64")
    config.algorithm.filter_groups.enable = True
    (problem,) = problems(config)
    assert problem.startswith(
        "actor_rollout_ref.rollout.n=1 must be >= 2: algorithm.filter_groups.enable=true compares"
    )
    config.actor_rollout_ref.rollout.n, config.data.gen_batch_size = 2, 6
    assert problems(config)[0].endswith("algorithm.filter_groups.max_num_gen_batches=11")
    config.algorithm.filter_groups.max_num_gen_batches = 11
    assert problems(config) == []


def test_roles_that_are_not_used_keep_no_rules(config):
    """A critic of another folder and layout beside GRPO. Would not catch a worker that builds it."""
    config.critic.model.path, config.critic.megatron.tensor_model_parallel_size = "/nowhere", 5
    assert len(problems(config)) == 2
    config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n = "grpo", 2
    assert problems(config) == []
    assert trained_roles(config).keys() == configured_models(config).keys() == {"actor"}


def test_which_roles_there_are(config):
    """Would not catch a key that is ignored when the roles are built."""
    assert uses_critic(config) and uses_reference(config)
    config.algorithm.adv_estimator, config.algorithm.use_kl_in_reward = "remax", False
    assert not uses_critic(config) and not uses_reference(config)
    config.critic.enable = config.actor_rollout_ref.actor.use_kl_loss = True
    assert uses_critic(config) and uses_reference(config)
