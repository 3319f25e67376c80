"""Weights and masks for samples that the rollout engine drew with slightly other probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.correction import RolloutCorrectionConfig, criteria
from megatron_rl.losses.rollout_correction import (
    correct_rollout,
    current_correction,
    importance_weights,
    measure,
    not_vetoed,
)

LENGTHS = torch.tensor([2, 1])
LOG_RATIO = torch.tensor([2.0, 0.25, 4.0]).log()  # products 0.5 and 4, means sqrt(0.5) and 4


def weights_of(log_ratio: torch.Tensor, lengths: torch.Tensor, *bounds) -> list[float]:
    return importance_weights(log_ratio, lengths, *bounds)[0].tolist()


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        (("token", 3.0), [2.0, 0.25, 3.0]),
        (("sequence", 3.0), [0.5, 0.5, 3.0]),
        (("token", 3.0, 0.5), [2.0, 0.0, 0.0]),
        (("sequence", 3.0, 0.25), [0.5, 0.5, 0.0]),
    ],
)
def test_weights_by_hand(bounds, expected):
    """Truncated at 3, and 0 outside of two bounds. Would not catch weights that are not multiplied with a loss."""
    assert weights_of(LOG_RATIO, LENGTHS, *bounds) == pytest.approx(expected)


def mask_of(rollout_rs: str, threshold: object, lower: float | None = None) -> list[float]:
    """Of log-probs log 1/4 + LOG_RATIO now and log 1/4 in the rollout."""
    config = RolloutCorrectionConfig(
        rollout_rs=rollout_rs, rollout_rs_threshold=threshold, rollout_rs_threshold_lower=lower
    )
    rollout = torch.full((3,), 0.2).log()
    return correct_rollout(rollout + LOG_RATIO, rollout, LENGTHS, config)[1].tolist()


@pytest.mark.parametrize(
    ("level", "low", "high", "expected"),
    [
        ("token", 0.5, 2.5, [1, 0, 0]),
        ("sequence", 0.4, 2.5, [1, 1, 0]),
        ("sequence", 0.6, 5.0, [0, 0, 1]),
        ("geometric", 0.7, 1.0, [1, 1, 0]),
        ("geometric", 0.71, 5.0, [0, 0, 1]),
    ],
)
def test_masks_of_the_older_names_by_hand(level, low, high, expected):
    """Bounds of p_trainer / p_rollout. Would not catch a mask that leaves the number of tokens as it was."""
    assert mask_of(level, high, low) == expected
    assert mask_of(level, f"{low}_{high}") == expected


# log rho is log 2, -2 log 2 | 2 log 2. k2: 0.2402, 0.9609 | 0.9609; k3: 0.3069, 0.6363 | 1.6137
@pytest.mark.parametrize(
    ("rollout_rs", "threshold", "expected"),
    [
        ("token_k1", "0.3_5.0", [1, 1, 0]),  # 1 / rho is 0.5, 4 | 0.25
        ("token_k1", 3.0, [1, 0, 0]),
        ("seq_sum_k1", "1.9_2.1", [1, 1, 0]),  # 2 | 0.25
        ("seq_mean_k1", "1.4_1.5", [1, 1, 0]),  # sqrt 2 | 0.25
        ("seq_mean_k1", "0.2_1.4", [0, 0, 1]),
        ("token_k2", 0.25, [1, 0, 0]),
        ("token_k3", "1.0", [1, 1, 0]),
        ("seq_sum_k2", 1.0, [0, 0, 1]),  # 1.2011 | 0.9609
        ("seq_sum_k3", 1.0, [1, 1, 0]),  # 0.9431 | 1.6137
        ("seq_mean_k2", 0.7, [1, 1, 0]),  # 0.6006 | 0.9609
        ("seq_mean_k3", 0.4, [0, 0, 0]),  # 0.4716 | 1.6137
        ("seq_max_k2", 0.97, [1, 1, 1]),
        ("seq_max_k3", 0.63, [0, 0, 0]),
        ("seq_max_k3", 0.64, [1, 1, 0]),
        # Of 0.4 against 0.2: 0.4 log 2 + 0.6 log 0.75 = 0.1046, and back 0.0915; of 0.05 0.1395 back; of 0.8 0.832
        ("binary_kl", 0.11, [1, 0, 0]),
        ("binary_kl", 0.14, [1, 1, 0]),
        ("token_k2,seq_max_k3", "0.25,0.64", [1, 0, 0]),
        (" token_k3 , token_k1,token_k3", "1.0,0.3_5.0", [1, 1, 0]),
        ("token_k2,token_k3", 0.97, [1, 1, 0]),
    ],
)
def test_masks_by_hand(rollout_rs, threshold, expected):
    """Every criterion, alone and with others. Would not catch a bound that is missed by rounding."""
    assert mask_of(rollout_rs, threshold) == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rollout_rs": "token_k9", "rollout_rs_threshold": 1.0}, "token_k9 is no criterion"),
        ({"rollout_rs": "token_k2"}, "must be set"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"}, "must be one number for token_k2"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "must be > 1"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2_1"}, "the lower one first"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "a_b"}, "must be a number, or LOWER_UPPER"),
        ({"rollout_rs": "token_k2,token_k3", "rollout_rs_threshold": "1,2,3"}, "one for each of 2 criteria"),
        (
            {"rollout_rs": "token", "rollout_rs_threshold": 2.0, "rollout_rs_threshold_lower": 3.0},
            "must be >= the lower",
        ),
    ],
)
def test_thresholds_that_cannot_be_read(keys, message):
    """Would not catch one that preflight lets pass; it asks the same function."""
    with pytest.raises(ValueError, match=message):
        criteria(RolloutCorrectionConfig(**keys))


def test_veto_takes_the_whole_answer():
    """One token of ratio 0.25 below 0.3. Would not catch a ratio that overflows."""
    assert not_vetoed(LOG_RATIO, LENGTHS, 0.3).tolist() == [0.0, 0.0, 1.0]
    assert not_vetoed(LOG_RATIO, LENGTHS, 0.2).tolist() == [1.0, 1.0, 1.0]


def test_unknown_level():
    """Would not catch one that preflight lets pass."""
    with pytest.raises(ValueError, match="word is no level"):
        importance_weights(LOG_RATIO, LENGTHS, "word", 2.0)


def correct(**keys) -> tuple:
    weights, kept, metrics = correct_rollout(LOG_RATIO, torch.zeros(3), LENGTHS, RolloutCorrectionConfig(**keys))
    return weights, kept, {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}


def test_what_is_configured():
    """Weights alone, a mask alone, both with normalisation. Would not catch a metric that is absent."""
    weights, kept, metrics = correct()
    assert (weights, kept) == (None, None) and not any(name.startswith("rollout_") for name in metrics.keys() - PPL)
    weights, kept, metrics = correct(rollout_is="token")
    assert weights.tolist() == pytest.approx([2.0, 0.25, 2.0]) and kept is None
    assert metrics["rollout_is_mean"] == pytest.approx(4.25 / 3)
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(4.25**2 / 3 / (4 + 0.0625 + 4))
    weights, kept, metrics = correct(rollout_rs="token", rollout_rs_threshold=2.0, rollout_token_veto_threshold=1e-4)
    assert weights is None and kept.tolist() == [1.0, 0.0, 0.0]
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollout_rs_seq_masked_fraction"] == 1.0
    assert metrics["rollout_is_veto_fraction"] == 0.0
    # Left out or not, all weights count in their mean, which the metric is not divided by
    keys = {"rollout_is_threshold": 4.0, "rollout_is_batch_normalize": True}
    weights, kept, metrics = correct(**keys, rollout_is="token", rollout_rs="token", rollout_rs_threshold_lower=1.0)
    mean = 6.25 / 3
    assert kept.tolist() == [1.0, 0.0, 1.0] and weights.tolist() == pytest.approx([2 / mean, 0.25 / mean, 4 / mean])
    assert metrics["rollout_is_mean"] == metrics["rollout_is_batch_norm_factor"] == pytest.approx(mean)
    # Of answers it is the mean over answers, 0.5 and 4, not over tokens
    weights, _, metrics = correct(**keys, rollout_is="sequence")
    assert weights.tolist() == pytest.approx([0.5 / 2.25, 0.5 / 2.25, 4 / 2.25])
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(2.25)
    assert metrics["rollout_is_mean"] == pytest.approx(5 / 3)


PPL = {"rollout_ppl", "rollout_log_ppl"}


def test_mismatch_metrics_by_hand():
    """The rollout's log-probs are 0; an empty answer counts nowhere. Would not catch another clamp."""
    config, lengths = RolloutCorrectionConfig(), torch.tensor([2, 0, 1])
    _, _, found = correct_rollout(LOG_RATIO, torch.zeros(3), lengths, config)
    log2 = math.log(2)
    means = [-log2 / 2, 2 * log2]  # of the trainer's log-probs, by answer
    diffs = [-mean for mean in means]
    expected = {
        "kl": -log2 / 3,
        "k3_kl": (2 + 0.25 + 4) / 3 - log2 / 3 - 1,
        "training_ppl": (2**0.5 + 0.25) / 2,
        "training_log_ppl": -sum(means) / 2,
        "rollout_ppl": 1.0,
        "rollout_log_ppl": 0.0,
        "log_ppl_diff": sum(diffs) / 2,
        "log_ppl_abs_diff": 2.5 * log2 / 2,
        "log_ppl_diff_max": log2 / 2,
        "log_ppl_diff_min": -2 * log2,
        "ppl_ratio": (2**0.5 + 0.25) / 2,
        "chi2_token": (4 + 0.0625 + 16) / 3 - 1,
        "chi2_seq": (0.25 + 16) / 2 - 1,
    }
    assert found == {f"rollout_corr/{name}": pytest.approx(value, abs=1e-6) for name, value in expected.items()}


def test_weight_metrics_by_hand():
    """Of answers whose products are 0.5 and 4, bounds 0.6 and 3. Would not catch another definition of a quantile."""
    _, _, found = correct(rollout_is="sequence", rollout_is_threshold="0.6_3.0")
    expected = {"mean": 0, "max": 4, "min": 0.5, "std": 0, "eff_sample_size": 0}  # every weight is out of bounds
    expected |= {"ratio_fraction_high": 0.5, "ratio_fraction_low": 0.5, "oob_ratio": 1}
    expected |= {"seq_mean": 0, "seq_std": 0, "seq_max": 0, "seq_min": 0, "seq_max_deviation": 1}
    expected |= {"seq_fraction_high": 0.5, "seq_fraction_low": 0.5}
    names = found.keys() - correct()[2].keys()
    assert {name: found[name] for name in names} == {f"rollout_is_{k}": pytest.approx(v) for k, v in expected.items()}
    _, _, found = correct(rollout_is="token", rollout_is_threshold=3.0)
    mean, square = 5.25 / 3, (4 + 0.0625 + 9) / 3
    expected = {"mean": mean, "max": 3, "min": 0.25, "std": (square - mean**2) ** 0.5, "ratio_fraction_high": 1 / 3}
    expected |= {"ratio_fraction_low": 1 / 3, "eff_sample_size": mean**2 / square, "seq_mean": (1.125 + 3) / 2}
    expected |= {"seq_std": 1.875 / 2**0.5, "seq_max": 3, "seq_min": 1.125, "seq_max_deviation": 2}
    expected |= {"seq_fraction_high": 0.5, "seq_fraction_low": 0}
    names = found.keys() - correct()[2].keys()
    assert {name: found[name] for name in names} == {f"rollout_is_{k}": pytest.approx(v) for k, v in expected.items()}


def test_criterion_metrics_by_hand():
    """k1, which is a logarithm, and a k2 of answers. Would not catch what verl adds to them later."""
    _, _, found = correct(rollout_rs="token_k1,seq_sum_k2", rollout_rs_threshold="0.3_3.0,1.0")
    log2 = math.log(2)
    k1, low, high = [-log2, 2 * log2, -2 * log2], math.log(0.3), math.log(3)
    limited = [-log2, high, low]
    mean = sum(limited) / 3
    expected = {"mean": -log2 / 3, "max": 2 * log2, "min": -2 * log2, "fraction_high": 1 / 3, "fraction_low": 1 / 3}
    expected |= {"std": (sum(x * x for x in limited) / 3 - mean**2) ** 0.5, "masked_fraction": 2 / 3}
    expected |= {"seq_mean": (log2 / 2 - 2 * log2) / 2, "seq_std": 2.5 * log2 / 2**0.5, "seq_max": log2 / 2}
    expected |= {"seq_min": -2 * log2, "seq_max_deviation": 2 * log2, "seq_fraction_high": 0, "seq_fraction_low": 0.5}
    expected |= {"seq_masked_fraction": 1}
    named = {f"rollout_rs_token_k1_{name}": value for name, value in expected.items()}
    k2 = [sum(x * x / 2 for x in k1[:2]), k1[2] ** 2 / 2]
    mean = (2 * k2[0] + k2[1]) / 3
    expected = {"mean": mean, "max": k2[0], "min": k2[1], "fraction_high": 0.5, "fraction_low": 0}
    expected |= {"std": ((2 + k2[1] ** 2) / 3 - ((2 + k2[1]) / 3) ** 2) ** 0.5, "masked_fraction": 2 / 3}
    expected |= {"seq_mean": sum(k2) / 2, "seq_std": (k2[0] - k2[1]) / 2**0.5, "seq_max": k2[0], "seq_min": k2[1]}
    expected |= {"seq_max_deviation": k2[0], "seq_fraction_high": 0.5, "seq_masked_fraction": 0.5}
    named |= {f"rollout_rs_seq_sum_k2_{name}": value for name, value in expected.items()}
    named |= {"rollout_rs_masked_fraction": 1.0, "rollout_rs_seq_masked_fraction": 1.0}
    names = found.keys() - correct()[2].keys()
    assert {name: found[name] for name in names} == {k: pytest.approx(v, abs=1e-6) for k, v in named.items()}


def test_everything_left_out_is_no_error():
    """A whole batch below the veto. Would not catch an update that is taken for it; `tests/dist` does."""
    weights, kept, metrics = correct(rollout_is="sequence", rollout_token_veto_threshold=1.0, rollout_rs="token")
    assert kept.tolist() == [0.0, 0.0, 0.0] and torch.isfinite(weights).all()
    assert metrics["rollout_rs_masked_fraction"] == 1.0


def test_no_token_at_all():
    """Two empty answers. Would not catch what the loop makes of them."""
    keys = {"rollout_is": "sequence", "rollout_is_batch_normalize": True, "rollout_token_veto_threshold": 0.1}
    config = RolloutCorrectionConfig(**keys, rollout_rs="token,seq_max_k2,binary_kl", rollout_rs_threshold=2.0)
    weights, kept, metrics = correct_rollout(torch.zeros(0), torch.zeros(0), torch.tensor([0, 0]), config)
    assert weights.shape == kept.shape == (0,) and metrics == {}


def test_of_the_policy_as_it_is():
    """What bypass_mode does in the loss is what is done before it elsewhere. Would not catch a mean over ranks."""
    config = RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_threshold="0.4_3.0", rollout_rs="token_k1,seq_sum_k2", bypass_mode=True,
        rollout_rs_threshold="0.3_5.0,1.3", rollout_token_veto_threshold=0.2,
    )  # fmt: skip
    log_probs = LOG_RATIO.clone().requires_grad_()
    weights, kept, metrics = current_correction(log_probs, torch.zeros(3), LENGTHS, config)
    before, mask, whole = correct_rollout(LOG_RATIO, torch.zeros(3), LENGTHS, config)
    assert torch.equal(weights, before) and torch.equal(kept, mask) and kept.tolist() == [1, 1, 0]
    assert weights.tolist() == pytest.approx([0.5, 0.5, 0.0])
    assert not any(x.requires_grad for x in (weights, kept, *metrics.values()))
    for name, terms in metrics.items():
        assert terms.shape == (3,) and float(terms.mean()) == pytest.approx(whole[name], abs=1e-6), name
    weights, kept, metrics = current_correction(
        log_probs, torch.zeros(3), LENGTHS, RolloutCorrectionConfig(bypass_mode=True)
    )
    assert weights.tolist() == kept.tolist() == [1, 1, 1]
    assert metrics.keys() == {f"rollout_corr/{name}" for name in ("kl", "k3_kl", "chi2_token")}


def test_a_product_beyond_the_limit_of_one_token():
    """log rho of -30 and 24.5: e^-5.5 = 0.0041, and -w A log p over both is w (31 + 0.5) / 2; kl is 5.5 / 2.

    Limited one by one the product would be 1. Would not catch another limit of the product.
    """
    log_probs, rollout = torch.tensor([-31.0, -0.5]), torch.tensor([-1.0, -25.0])
    config = RolloutCorrectionConfig(rollout_is="sequence", bypass_mode=True, loss_type="reinforce")
    weights, _, metrics = current_correction(log_probs, rollout, torch.tensor([2]), config)
    assert weights.tolist() == pytest.approx([math.exp(-5.5)] * 2, rel=1e-5)
    assert float((-weights * log_probs).mean()) == pytest.approx(15.75 * math.exp(-5.5), rel=1e-5)  # 0.0644
    assert metrics["rollout_corr/kl"].tolist() == [30.0, -24.5]
    before, _, whole = correct_rollout(log_probs, rollout, torch.tensor([2]), config)
    assert torch.equal(weights, before) and whole["rollout_corr/kl"] == 2.75


rows = st.lists(st.lists(st.floats(-3, 3), max_size=4), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(rows=rows, threshold=st.sampled_from([1.1, 2.0, 10.0]))
def test_agrees_with_a_loop(rows, threshold):
    """Python floats, both levels of weights, three criteria. Would not catch ratios beyond e^20."""
    lengths = torch.tensor([len(row) for row in rows])
    log_ratio = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    by_token = [min(math.exp(x), threshold) for row in rows for x in row]
    by_answer = [min(math.exp(sum(row)), threshold) for row in rows for _ in row]
    assert weights_of(log_ratio, lengths, "token", threshold) == pytest.approx(by_token, rel=1e-6)
    assert weights_of(log_ratio, lengths, "sequence", threshold) == pytest.approx(by_answer, rel=1e-6)
    none = torch.zeros_like(log_ratio)
    loops = {
        "token_k3": lambda row, x: math.exp(x) - 1 - x,
        "seq_mean_k3": lambda row, x: sum(math.exp(y) - 1 - y for y in row) / len(row),
        "seq_max_k2": lambda row, x: max(y * y / 2 for y in row),
        "seq_sum_k1": lambda row, x: -sum(row),
    }
    for name, loop in loops.items():
        expected = [loop(row, x) for row in rows for x in row]
        assert measure(log_ratio, none, lengths, name).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
