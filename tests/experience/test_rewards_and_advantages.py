"""From samples to rewards and advantages, on two rows worked out by hand."""

import pytest
import torch

from megatron_rl.columns import ACTOR_UPDATE
from megatron_rl.config.algorithm_keys import AlgorithmConfig
from megatron_rl.config.correction import RolloutCorrectionConfig
from megatron_rl.config.declarations import ESTIMATORS
from megatron_rl.errors import ConfigError
from megatron_rl.experience.rewards_and_advantages import (
    add_advantages,
    add_rewards,
    add_rollout_correction,
    highest_entropy,
    leave_out_truncated,
)
from megatron_rl.losses.estimators import estimate_gae
from megatron_rl.losses.group_advantages import estimate_grpo
from megatron_rl.records import ragged, ragged_from_lengths, single_turn
from megatron_rl.scoring.sampled_batch import SampledBatch


@pytest.fixture
def experience():
    """Prompts [1, 2] and [5]; responses [3] and [6, 7]."""
    experience = single_turn(
        ragged([torch.tensor([1, 2, 3]), torch.tensor([5, 6, 7])]),
        torch.tensor([1, 2]),
        rollout_log_probs=ragged([torch.tensor([-0.5]), torch.tensor([-1.0, -2.0])]),
        groups=torch.tensor([0, 1]),
        truncated=torch.tensor([False, True]),
    )
    experience.add(scores=torch.tensor([1.0, -1.0]))
    experience.add(old_log_probs=ragged([torch.tensor([-0.5]), torch.tensor([-1.0, -2.0])]))
    experience.add(ref_log_probs=ragged([torch.tensor([-1.0]), torch.tensor([-1.5, -1.0])]))
    experience.add(old_values=ragged([torch.tensor([0.25]), torch.tensor([0.5, 1.0])]))
    return experience


def rows(batch):
    return [pytest.approx(row.tolist(), abs=1e-6) for row in batch.unbind()]


def test_rewards_are_the_score_last_and_a_penalty_everywhere(experience):
    """kl_coef 0.2 on differences 0.5 | 0.5, -1.0. Would not catch a wrong estimator."""
    penalty = add_rewards(experience, kl_coef=0.2)
    assert rows(experience["rewards"]) == [[0.9], [-0.1, -0.8]]
    # Differences 0.5 | 0.5, -1.0: the means 0.5 and -0.25, and their mean
    assert float(penalty) == pytest.approx(0.125, abs=1e-6)
    assert experience["scores"].tolist() == [1.0, -1.0]
    assert rows(experience["old_log_probs"]) == [[-0.5], [-1.0, -2.0]]


def test_reported_kl(experience):
    """Differences 0.5 | 0.5, 1.0 give (0.5 + 0.75) / 2 whatever kl_coef is. Would not catch a wrong KL estimator."""
    experience.add(ref_log_probs=ragged([torch.tensor([-1.0]), torch.tensor([-1.5, -3.0])]))
    assert float(add_rewards(experience, kl_coef=0.2)) == pytest.approx(0.625, abs=1e-6)
    assert float(add_rewards(experience, kl_coef=0.0)) == pytest.approx(0.625, abs=1e-6)


def test_advantages_and_returns(experience):
    """Rewards 1 | 0, -1; gamma 0.5, lambda 0.5. Would not catch a wrong eps in whitening."""
    add_rewards(experience, kl_coef=0.0)
    add_advantages(experience, estimate_gae, AlgorithmConfig(gamma=0.5, lam=0.5))
    # Row 1: 1 - 0.25. Row 2: last -1 - 1 = -2; first 0.5*1 - 0.5 = 0, plus 0.25 * -2.
    # Advantages 0.75 | -0.5, -2: mean -7/12, unbiased standard deviation 1.376893.
    assert rows(experience["returns"]) == [[1.0], [0.0, -1.0]]
    assert rows(experience["advantages"]) == [[0.968364], [0.060523, -1.028887]]


def test_without_reference_and_critic(experience):
    """Rewards are scores alone, no KL is reported, groups make advantages. Would not catch a role that is built."""
    experience = experience.without("ref_log_probs", "old_values")
    experience.add(groups=torch.tensor([3, 3]))
    assert add_rewards(experience, kl_coef=0.2) is None
    assert rows(experience["rewards"]) == [[1.0], [0.0, -1.0]]
    add_advantages(experience, estimate_grpo, AlgorithmConfig(norm_adv_by_std_in_grpo=False))
    assert rows(experience["advantages"]) == [[1.0], [-1.0, -1.0]]


@pytest.mark.parametrize("value", [torch.ones(2), torch.tensor([1.0, torch.nan, 1.0])])
def test_estimator_that_returns_something_else(experience, value):
    """A wrong number of tokens, and NaN. Would not catch advantages in another order."""
    add_rewards(experience, kl_coef=0.0)
    with pytest.raises(ConfigError, match="adv_estimator=mine must return finite advantages of shape .3."):
        add_advantages(experience, lambda samples, config: (value, value), AlgorithmConfig(adv_estimator="mine"))


def test_kl_in_reward_by_another_estimator(experience):
    """mse: half the squared differences 0.5 | 0.5, -1. Would not catch a name that is not passed on."""
    kl = add_rewards(experience, kl_coef=1.0, kl_type="mse")
    assert rows(experience["rewards"]) == [[1 - 0.125], [-0.125, -1 - 0.5]]
    assert float(kl) == pytest.approx((0.125 + 0.3125) / 2)


def test_rollout_correction_fills_what_is_configured(experience):
    """Trainer and rollout differ by log 4 on one token. Would not catch a wrong formula; its own tests do."""
    measured = add_rollout_correction(experience, RolloutCorrectionConfig())
    assert measured["rollout_corr/kl"] == 0 and measured["rollout_corr/ppl_ratio"] == 1
    assert "rollout_weights" not in experience and "kept" not in experience
    assert add_rollout_correction(experience, RolloutCorrectionConfig(rollout_is="token", bypass_mode=True)) == {}
    assert "rollout_weights" not in experience
    experience.add(old_log_probs=ragged([torch.tensor([-0.5]), torch.tensor([-1.0, -2.0 + 1.3862944])]))
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=3.0, rollout_rs="token")
    metrics = add_rollout_correction(experience, config)
    assert rows(experience["rollout_weights"]) == [[1.0], [1.0, 3.0]]
    assert rows(experience["kept"]) == [[1.0], [1.0, 0.0]]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    experience.add(advantages=experience["old_values"], trained=experience["kept"])
    batch = experience[:1].read_by(ACTOR_UPDATE)
    assert {"kept", "trained"} <= set(batch.neutral().names) and "old_values" not in batch


def test_truncated_answers_are_left_out(experience):
    """The second, then the first; what a criterion left out stays so. Would not catch an advantage that it changes."""
    experience.add(truncated=torch.tensor([False, True]))
    leave_out_truncated(experience)
    assert rows(experience["kept"]) == [[1.0], [0.0, 0.0]]
    kept = experience.per_sampled_token(torch.tensor([1.0, 0.0, 1.0]))
    experience.add(truncated=torch.tensor([True, False]), kept=kept)
    leave_out_truncated(experience)
    assert rows(experience["kept"]) == [[0.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, [[0.0], [0.0, 1.0], [], [0.0, 0.0, 0.0]]),
        (0.2, [[0.0], [0.0, 1.0], [], [0.0, 1.0, 1.0]]),
        (0.5, [[0.0], [0.0, 1.0], [], [0.0, 1.0, 1.0]]),
        (0.7, [[1.0], [0.0, 1.0], [], [0.0, 1.0, 1.0]]),
        (0.9, [[1.0], [0.0, 1.0], [], [1.0, 1.0, 1.0]]),
    ],
)
def test_tokens_of_high_entropy_are_chosen(share, expected):
    """Of 6 tokens 1 + floor(5 share), and those tied with the last; of no tokens none.

    Would not catch a wrong entropy; tests of the head do.
    """
    entropy = ragged_from_lengths(torch.tensor([1.0, 0.25, 3.0, 0.5, 2.0, 2.0]), torch.tensor([1, 2, 0, 3]))
    assert [row.tolist() for row in highest_entropy(entropy, share).unbind()] == expected
    nothing = ragged_from_lengths(torch.empty(0), torch.tensor([0, 0]))
    assert [row.tolist() for row in highest_entropy(nothing, share).unbind()] == [[], []]


# Prompt 0: scores 1 and 0, one episode failed; prompt 1: 1, whose only peer failed; prompt 2: one episode alone, 2.
FAILED = [False, False, True, False, True, False]
OF_ROWS_THAT_ENDED = {
    # A lone response of the run's own choice has its score, as in verl; a survivor of failed peers has nothing.
    "grpo": [0.5**0.5, -(0.5**0.5), None, 0.0, None, 2.0],
    "grpo batch": [0.5, -0.5, None, 0.0, None, 2.0],  # 1, 0 and 2 have the standard deviation 1
    "gpg": [0.75, -0.75, None, 0.0, None, 3.0],  # three compared, two of them not 0
    "rloo": [1.0, -1.0, None, 0.0, None, 2.0],
}


@pytest.mark.parametrize("name", OF_ROWS_THAT_ENDED)
def test_failed_episodes_are_no_scores(name):
    """By hand. Would not catch a metric over all rows."""
    lengths = torch.tensor([0 if failed else 1 for failed in FAILED])
    batch = single_turn(
        ragged([torch.tensor([4, 3][: 1 + n]) for n in lengths.tolist()]),
        lengths,
        rollout_log_probs=ragged([torch.zeros(n) for n in lengths.tolist()]),
        failed=torch.tensor(FAILED),
    )
    batch.add(uid=torch.tensor([0, 0, 0, 1, 1, 2]))
    SampledBatch(1, batch)
    batch.add(scores=torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 2.0]))
    add_rewards(batch, 0.0)
    estimator, *by = name.split()
    config = AlgorithmConfig(adv_estimator=estimator, scale_rewards="batch" if by else "group")
    add_advantages(batch, ESTIMATORS[estimator].function, config)
    expected = [value for value in OF_ROWS_THAT_ENDED[name] if value is not None]
    assert batch.flat("advantages").tolist() == pytest.approx(expected, abs=1e-5)
    add_advantages(only_failed := batch[2:5], ESTIMATORS[estimator].function, config)
    assert only_failed.flat("advantages").tolist() == [0.0]


def test_empty_responses(experience):
    """One among others leaves all other rows as they are, and no KL or reward without a token; then nothing but such.

    Would not catch a role that cannot score such a row; `tests/dist/test_empty_responses.py` does.
    """
    three = torch.tensor([1, 0, 2])
    mixed = single_turn(
        ragged([torch.tensor([1, 2, 3]), torch.tensor([9]), torch.tensor([5, 6, 7])]),
        three,
        rollout_log_probs=ragged_from_lengths(experience.flat("rollout_log_probs"), three),
        groups=torch.tensor([0, 0, 1]),
        scores=torch.tensor([1.0, 5.0, -1.0]),
        old_log_probs=ragged_from_lengths(experience.flat("old_log_probs"), three),
        ref_log_probs=ragged_from_lengths(experience.flat("ref_log_probs"), three),
    )
    assert float(add_rewards(mixed, kl_coef=0.2)) == pytest.approx(0.125, abs=1e-6)
    assert rows(mixed["rewards"]) == [[0.9], [], [-0.1, -0.8]]
    add_advantages(mixed, estimate_grpo, AlgorithmConfig(norm_adv_by_std_in_grpo=False))
    assert rows(mixed["advantages"]) == [[0.9 - 2.95], [], [-0.9, -0.9]]  # the last is alone in its group
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="geometric", rollout_token_veto_threshold=1e-4)
    metrics = add_rollout_correction(mixed, config)
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == metrics["rollout_corr/rollout_rs_masked_fraction"] == 0

    empty = mixed[1:2]
    assert add_rewards(empty, kl_coef=0.2) is None and empty.flat("rewards").numel() == 0
    add_advantages(empty, estimate_grpo, AlgorithmConfig())
    assert add_rollout_correction(empty, config) == {}
    assert empty.read_by(ACTOR_UPDATE).flat("advantages").numel() == 0
