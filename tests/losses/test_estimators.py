"""Every advantage estimator: by hand on two prompts, and against Python loops on random ragged batches."""

from __future__ import annotations

import math

import pytest
import torch
from estimator_loops import LOOPS, whitened
from hypothesis import given, settings
from ragged_rows import Batch, batches, flat

from megatron_rl.config.algorithm_keys import AlgorithmConfig
from megatron_rl.config.declarations import ESTIMATORS as DECLARED
from megatron_rl.losses.estimators import Samples

ESTIMATORS = {name: declared.function for name, declared in DECLARED.items()}

# Groups a = rows 0, 2 and 3, b = rows 1 and 4; totals 1, 0, 0, 4 | 2
GROUPS = torch.tensor([5, 9, 5, 5, 9])
LENGTHS = torch.tensor([1, 2, 3, 1, 1])
REWARDS = torch.tensor([1.0, 0.5, -0.5, 0.0, 0.0, 0.0, 5.0, 2.0])
SCORES = torch.tensor([1.0, 0.0, 0.0, 5.0, 2.0])
GREEDY = torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0])


def on_tokens(advantages: list[float]) -> list[float]:
    return torch.tensor(advantages).repeat_interleave(LENGTHS).tolist()


# Group a: totals 1, 0, 5 have mean 2 and standard deviation sqrt((1 + 4 + 9) / 2) = sqrt 7; b: 0, 2 have 1 and sqrt 2.
CENTRED = [-1.0, -1.0, -2.0, 3.0, 1.0]
BY_HAND = {
    "grpo": on_tokens([c / s for c, s in zip(CENTRED, [7**0.5, 2**0.5, 7**0.5, 7**0.5, 2**0.5], strict=True)]),
    # Others' means: a 2.5, 3, 0.5; b 2, 0
    "rloo": on_tokens([1 - 2.5, 0 - 2.0, 0 - 3.0, 5 - 0.5, 2 - 0.0]),
    # Length-weighted baselines: a (1*1 + 3*0 + 1*5) / 5 = 1.2; b (2*0 + 1*2) / 3
    "opo": on_tokens([1 - 1.2, 0 - 2 / 3, 0 - 1.2, 5 - 1.2, 2 - 2 / 3]),
    "remax": [1.0 - 1, 0.0 - 2, -0.5 - 2, 0.0 - 1, 0.0 - 1, 0.0 - 1, 5.0 - 1, 2.0 - 2],
    # The best of a is worth 5 and the second 1; of b 2 and 0
    "grpo_passk": on_tokens([0.0, 0.0, 0.0, 4 / 7**0.5, 2 / 2**0.5]),
    # Group means are 2 and 1
    "max_rl": on_tokens([-1 / 2, -1.0, -1.0, 3 / 2, 1.0]),
    # Three of five totals are not 0
    "gpg": on_tokens([c * 5 / 3 for c in CENTRED]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    """Five answers to two prompts, samples interleaved. Would not catch a loss that takes them in another order."""
    samples = Samples(REWARDS, LENGTHS, GROUPS, SCORES, greedy_scores=GREEDY)
    advantages, _ = ESTIMATORS[name](samples, AlgorithmConfig())
    assert advantages.tolist() == pytest.approx(BY_HAND[name], abs=1e-5)


def test_reinforce_plus_plus_by_hand():
    """gamma 0.5, rows of 2 and 1: returns 2, 2 | -1 have mean 1 and variance 3. Would not catch a large eps."""
    samples = Samples(torch.tensor([1.0, 2.0, -1.0]), torch.tensor([2, 1]), torch.tensor([0, 1]), torch.zeros(2))
    advantages, returns = ESTIMATORS["reinforce_plus_plus"](samples, AlgorithmConfig(gamma=0.5))
    assert returns.tolist() == [2.0, 2.0, -1.0]
    assert advantages.tolist() == pytest.approx([3**-0.5, 3**-0.5, -2 * 3**-0.5], abs=1e-6)


def test_reinforce_plus_plus_baseline_by_hand():
    """Totals 2, 0 of 1 and 2 tokens: 1 | -1, -1, mean -1/3, variance 4/3. Would not catch whitening per answer."""
    samples = Samples(torch.tensor([2.0, 1.0, -1.0]), torch.tensor([1, 2]), torch.tensor([4, 4]), torch.zeros(2))
    advantages, _ = ESTIMATORS["reinforce_plus_plus_baseline"](samples, AlgorithmConfig())
    scale = (3 / 4) ** 0.5
    assert advantages.tolist() == pytest.approx([4 / 3 * scale, -2 / 3 * scale, -2 / 3 * scale], abs=1e-6)


def test_gdpo_by_hand():
    """Components 1, 0 and 0, 2 with weights 1 and 3, of 1 and 2 tokens. Would not catch a std over all groups.

    Normalised they are +-1 / sqrt 2; (1 - 3) / sqrt 2 = -sqrt 2 on one token and sqrt 2 on two have mean sqrt(2) / 3
    and variance 8 / 3.
    """
    components = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    samples = Samples(torch.zeros(3), torch.tensor([1, 2]), torch.tensor([4, 4]), torch.zeros(2), components=components)
    advantages, _ = ESTIMATORS["gdpo"](samples, AlgorithmConfig(gdpo_reward_weights=[1.0, 3.0]))
    expected = [-4 / 3 * 2**0.5, 2 / 3 * 2**0.5, 2 / 3 * 2**0.5]
    assert advantages.tolist() == pytest.approx([x * (3 / 8) ** 0.5 for x in expected], abs=1e-5)


def test_gdpo_without_the_division():
    """Components 2, 0 and 0, 10 with weights 2 and 1: +-1 / sqrt 2 each once divided, so that the first decides; else
    2 - 5 and -2 + 5, and the second does. Whitened 1 / sqrt 2 either way. Would not catch a port that keeps the key.
    """
    components = torch.tensor([[2.0, 0.0], [0.0, 10.0]])
    samples = Samples(torch.zeros(2), torch.tensor([1, 1]), torch.tensor([4, 4]), torch.zeros(2), components=components)
    for divides, sign in ((True, 1), (False, -1)):
        config = AlgorithmConfig(norm_adv_by_std_in_grpo=divides, gdpo_reward_weights=[2.0, 1.0])
        advantages, _ = ESTIMATORS["gdpo"](samples, config)
        assert advantages.tolist() == pytest.approx([sign * 0.5**0.5, -sign * 0.5**0.5], abs=1e-5)


def test_optimal_token_baseline_by_hand():
    """Two answers to a prompt, of 2 and 1 tokens, scores 1 and 3; a third to another. Would not catch a large eps.

    At the first place energies are 1 - 2 * 0.5 + 0.5 = 0.5 and, with the square of weight 2, 4 * (1 - 1.6 + 0.68) =
    0.32: the baseline is (0.5 * 1 + 0.32 * 3) / 0.82. At the second the first answer is alone, as the third is.
    """
    probs, squares = torch.tensor([0.5, 0.5, 0.8, 0.5]), torch.tensor([0.5, 0.5, 0.68, 0.5])
    samples = Samples(
        torch.tensor([0.0, 1.0, 3.0, 7.0]),
        torch.tensor([2, 1, 1]),
        torch.tensor([4, 4, 5]),
        torch.zeros(3),
        old_log_probs=probs.log(),
        sum_pi_squared=squares,
        rollout_weights=torch.tensor([1.0, 1.0, 2.0, 1.0]),
    )
    advantages, returns = ESTIMATORS["optimal_token_baseline"](samples, AlgorithmConfig())
    baseline = 1.46 / 0.82
    assert returns.tolist() == [1.0, 1.0, 3.0, 7.0]
    assert advantages.tolist() == pytest.approx([1 - baseline, 1.0, 3 - baseline, 7.0], abs=1e-5)


@pytest.mark.parametrize("rounding", [-6e-8, 0.0, 6e-8])
def test_optimal_token_baseline_of_certain_tokens(rounding):
    """Probabilities of 1 have energies of 0, or of rounding, below 0 too: the baseline is the plain mean.

    Would not catch a floor that is too high: energies of 0.3 are in the test above."""
    scores = torch.tensor([1.0, 3.0])
    samples = Samples(
        scores,
        torch.tensor([1, 1]),
        torch.tensor([4, 4]),
        scores,
        old_log_probs=torch.zeros(2),
        sum_pi_squared=torch.full((2,), 1 + rounding),
    )
    advantages, _ = ESTIMATORS["optimal_token_baseline"](samples, AlgorithmConfig())
    assert advantages.tolist() == pytest.approx([-1.0, 1.0], abs=0.02)


def test_two_best_answers_add_nothing():
    """Pass@k: of 2, 2, 0 none is missed. Would not catch a tie that rounding hides."""
    scores = torch.tensor([2.0, 2.0, 0.0])
    samples = Samples(scores, torch.ones(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), scores)
    assert ESTIMATORS["grpo_passk"](samples, AlgorithmConfig())[0].tolist() == [0.0, 0.0, 0.0]


def test_max_rl_of_rare_answers():
    """One right of four: 3 and -1; none right: nothing; a mean below 0: nothing. Would not catch an eps of 1e-3."""
    scores, groups = torch.tensor([1.0, 0, 0, 0, 0, 0, -1, 0]), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    samples = Samples(scores, torch.ones(8, dtype=torch.int64), groups, scores)
    advantages, _ = ESTIMATORS["max_rl"](samples, AlgorithmConfig())
    assert advantages.tolist() == pytest.approx([3.0, -1.0, -1.0, -1.0, 0, 0, 0, 0], abs=1e-4)
    tenths = torch.tensor([0.3, -0.4, -1.0, -1.0, 0.7, -0.8, 1.0, 1.2])  # their mean is 0, but for rounding
    samples = Samples(tenths, torch.ones(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64), tenths)
    assert ESTIMATORS["max_rl"](samples, AlgorithmConfig())[0].tolist() == [0.0] * 8


def test_grpo_scaled_by_the_batch():
    """Totals 1, 0, 0, 5, 2 have mean 1.6 and variance 17.2 / 4. Would not catch a std of tokens in equal lengths."""
    samples = Samples(REWARDS, LENGTHS, GROUPS, SCORES)
    advantages, _ = ESTIMATORS["grpo"](samples, AlgorithmConfig(scale_rewards="batch"))
    assert advantages.tolist() == pytest.approx(on_tokens([c / 4.3**0.5 for c in CENTRED]), abs=1e-5)
    lone = Samples(torch.ones(1), torch.tensor([1]), torch.tensor([0]), torch.ones(1))
    assert ESTIMATORS["grpo"](lone, AlgorithmConfig(scale_rewards="batch"))[0].tolist() == [1.0]


def test_gae_with_a_lambda_for_each_length():
    """alpha 1: lambda 0 of one token and 1/2 of two. Deltas 0.75 | 0.5, -2: 0.75 | 0.5 - 1, -2, and returns of lam 1.

    Would not catch lengths that count prompts.
    """
    samples = Samples(
        torch.tensor([1.0, 0.0, -1.0]),
        torch.tensor([1, 2]),
        torch.tensor([0, 1]),
        torch.zeros(2),
        values=torch.tensor([0.25, 0.5, 1.0]),
    )
    advantages, returns = ESTIMATORS["gae"](samples, AlgorithmConfig(adaptive_lam_alpha=1.0))
    assert returns.tolist() == pytest.approx([1.0, -1.0, -1.0])
    assert advantages.tolist() == pytest.approx(whitened([0.75, -0.5, -2.0]), abs=1e-6)


def test_dr_grpo_does_not_divide():
    """Would not catch a division by the length, which is the aggregation's."""
    samples = Samples(REWARDS, LENGTHS, GROUPS, SCORES)
    advantages, returns = ESTIMATORS["grpo"](samples, AlgorithmConfig(norm_adv_by_std_in_grpo=False))
    assert advantages.tolist() == returns.tolist() == pytest.approx(on_tokens(CENTRED))


def test_gae_reads_values_and_whitens():
    """Returns 1 | 0, -1 and advantages whitened, as in `test_rewards_and_advantages.py`. Would not catch a wrong
    gamma.
    """
    samples = Samples(
        torch.tensor([1.0, 0.0, -1.0]),
        torch.tensor([1, 2]),
        torch.tensor([0, 1]),
        torch.zeros(2),
        values=torch.tensor([0.25, 0.5, 1.0]),
    )
    advantages, returns = ESTIMATORS["gae"](samples, AlgorithmConfig(gamma=0.5, lam=0.5))
    assert returns.tolist() == pytest.approx([1.0, 0.0, -1.0])
    assert advantages.tolist() == pytest.approx([0.968364, 0.060523, -1.028887], abs=1e-6)


@pytest.mark.parametrize("name", BY_HAND | {"reinforce_plus_plus_baseline": None})
def test_equal_scores_teach_nothing(name):
    """Groups of 3 and 5 equal scores that float32 cannot add up exactly: 0, to the last bit.

    Would not catch a step that is taken for nothing.
    """
    scores, groups = torch.tensor([0.1] * 3 + [-0.7] * 5), torch.tensor([1] * 3 + [2] * 5)
    ones = torch.ones(8, dtype=torch.int64)
    samples = Samples(scores, ones, groups, scores, greedy_scores=scores)
    for norm_by_std in (True, False):
        advantages, _ = ESTIMATORS[name](samples, AlgorithmConfig(norm_adv_by_std_in_grpo=norm_by_std))
        assert advantages.tolist() == [0.0] * 8


# Groups of one, scores 3, 0 and -1, of 1, 2 and 1 tokens; the whitened have mean 0.5 over tokens and variance 3.
ALONE = [3.0, 0.0, 0.0, -1.0]
WHITENED = [2.5 / 3**0.5, -0.5 / 3**0.5, -0.5 / 3**0.5, -1.5 / 3**0.5]
GROUPS_OF_ONE = {
    **dict.fromkeys(("grpo", "grpo_vectorized", "gigpo"), [3 / (1 + 1e-6), 0.0, 0.0, -1 / (1 + 1e-6)]),
    "rloo": ALONE,
    "rloo_vectorized": ALONE,
    "opo": ALONE,
    "max_rl": ALONE,
    "gpg": [3 * 1.5, 0.0, 0.0, -1.5],  # two of three scores are not 0
    "optimal_token_baseline": ALONE,
    "tir_optimal_token_baseline": ALONE,
    "reinforce_plus_plus_baseline": WHITENED,
    "gdpo": WHITENED,
}


@pytest.mark.parametrize("name", GROUPS_OF_ONE)
def test_groups_of_one_by_hand(name):
    """Baseline 0 and standard deviation 1, as in verl: an advantage is the score. Would not catch a lone answer beside
    larger groups; loops do."""
    lengths, scores = torch.tensor([1, 2, 1]), torch.tensor([3.0, 0.0, -1.0])
    samples = Samples(
        torch.tensor(ALONE),
        lengths,
        torch.tensor([7, 2, 5]),
        scores,
        components=scores[:, None],
        old_log_probs=torch.tensor([-0.1, -0.5, -1.0, -2.0]),
        sum_pi_squared=torch.full((4,), 0.7),
    )
    advantages, _ = ESTIMATORS[name](samples, AlgorithmConfig())
    assert advantages.tolist() == pytest.approx(GROUPS_OF_ONE[name], abs=3e-7)


def test_every_estimator_of_groups_says_what_a_lone_answer_is_worth():
    """But for Pass@k, which preflight refuses. Would not catch an estimator of the user's."""
    declared = ((name, entry.traits) for name, entry in DECLARED.items())
    compare = {name for name, traits in declared if "groups" in traits.reads and not traits.second}
    assert compare == GROUPS_OF_ONE.keys()


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("scores", [[0.0] * 4, [0.1] * 4, [1.0] * 4])
def test_equal_scores_everywhere(name, scores):
    """Two groups of answers of different lengths, all with the same score: 0, to the last bit; but for the end of an
    answer that is longer than all others, which the optimal token baseline compares with nothing.

    Would not catch what such a step costs.
    """
    end = [0.0, 0.0, scores[0], scores[0]] if name.endswith("token_baseline") else [0.0] * 4
    lengths, groups, scores = torch.tensor([1, 3, 2, 2]), torch.tensor([0, 0, 1, 1]), torch.tensor(scores)
    rewards = torch.zeros(8)
    rewards[lengths.cumsum(0) - 1] = scores
    samples = Samples(
        rewards,
        lengths,
        groups,
        scores,
        values=torch.zeros(8),
        greedy_scores=scores,
        components=scores[:, None].repeat(1, 2),
        old_log_probs=torch.linspace(-2, -0.1, 8),
        ref_log_probs=torch.linspace(-1, -0.3, 8),
        sum_pi_squared=torch.full((8,), 0.7),
    )
    advantages, returns = ESTIMATORS[name](samples, AlgorithmConfig(adv_estimator=name))
    assert advantages.isfinite().all() and returns.isfinite().all()
    assert advantages.tolist() == [*torch.tensor(end).tolist(), 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_answers_without_a_token(name):
    """All of them, and all but one token: nothing is divided by zero. Would not catch a wrong baseline; loops do."""
    for lengths in ([0, 0, 0], [0, 1, 0]):
        num_tokens = sum(lengths)
        samples = Samples(
            torch.ones(num_tokens),
            torch.tensor(lengths),
            torch.tensor([4, 4, 5]),
            torch.tensor([3.0, 1.0, 2.0]),
            values=torch.zeros(num_tokens),
            greedy_scores=torch.ones(3),
            components=torch.tensor([[3.0, 1.0, 2.0], [0.0, 0.0, 1.0]]).T,
            old_log_probs=torch.full((num_tokens,), -1.0),
            ref_log_probs=torch.full((num_tokens,), -1.5),
            sum_pi_squared=torch.full((num_tokens,), 0.3),
        )
        for numbers in ESTIMATORS[name](samples, AlgorithmConfig()):
            assert numbers.shape == (num_tokens,) and numbers.isfinite().all()


def test_an_empty_answers_score_counts_in_its_group():
    """Scores 3 (no token) and 1: GRPO's mean is 2, RLOO's other answer 3; OPO weighs by tokens. By hand.

    Would not catch a penalty that is given to a token of another row.
    """
    lengths, groups, scores = torch.tensor([0, 2]), torch.tensor([6, 6]), torch.tensor([3.0, 1.0])
    samples = Samples(torch.tensor([0.0, 1.0]), lengths, groups, scores)
    plain = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    found = {name: ESTIMATORS[name](samples, plain)[0].tolist() for name in ("grpo", "rloo", "opo")}
    assert found == {"grpo": [-1.0, -1.0], "rloo": [-2.0, -2.0], "opo": [0.0, 0.0]}
    assert ESTIMATORS["grpo"](samples, AlgorithmConfig())[0].tolist() == pytest.approx([-(2**-0.5)] * 2, abs=1e-5)


@pytest.mark.parametrize("name", LOOPS)
@settings(max_examples=10, deadline=None)
@given(batch=batches())
def test_agrees_with_a_loop(name, batch: Batch):
    """Python floats, with and without standard deviation. Would not catch an error shared with the formula."""
    check_agreement(name, batch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LOOPS)
@settings(max_examples=200, deadline=None)
@given(batch=batches())
def test_agrees_with_a_loop_on_many_more_batches(name, batch: Batch):
    """The same, for longer."""
    check_agreement(name, batch)


def check_agreement(name: str, batch: Batch) -> None:
    samples = Samples(
        flat(batch.rewards),
        torch.tensor(batch.lengths),
        torch.tensor(batch.groups),
        torch.tensor(batch.totals, dtype=torch.float64),
        flat(batch.values),
        torch.tensor(batch.greedy, dtype=torch.float64),
        torch.tensor(batch.components, dtype=torch.float64),
        flat(batch.probs).log(),
        flat(batch.squares),
        flat(batch.weights),
        ref_log_probs=flat(batch.values),
    )
    for norm_by_std, weights in ((True, None), (False, [1.0, 0.5])):
        config = AlgorithmConfig(gamma=0.9, lam=0.8, norm_adv_by_std_in_grpo=norm_by_std, gdpo_reward_weights=weights)
        advantages, returns = ESTIMATORS[name](samples, config)
        assert advantages.tolist() == pytest.approx(LOOPS[name](batch, config), rel=1e-6, abs=1e-6)
        assert returns.shape == advantages.shape and all(map(math.isfinite, returns.tolist()))


def test_every_name_has_a_loop():
    """Would not catch needs that are wrong."""
    assert set(ESTIMATORS) == set(LOOPS)
