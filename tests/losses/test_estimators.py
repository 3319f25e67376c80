"""Every advantage estimator: by hand on two prompts, and against Python loops on random ragged batches."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from ragged_rows import Batch, batches, flat

from megatron_rl.config.algorithms import ADV_ESTIMATORS
from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.losses.estimators import Samples
from megatron_rl.losses.registry import ESTIMATORS

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


def test_dr_grpo_does_not_divide():
    """Would not catch a division by the length, which is the aggregation's."""
    samples = Samples(REWARDS, LENGTHS, GROUPS, SCORES)
    advantages, returns = ESTIMATORS["grpo"](samples, AlgorithmConfig(norm_adv_by_std_in_grpo=False))
    assert advantages.tolist() == returns.tolist() == pytest.approx(on_tokens(CENTRED))


def test_gae_reads_values_and_whitens():
    """Returns 1 | 0, -1 and advantages whitened, as in `test_assemble.py`. Would not catch a wrong gamma."""
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
def test_lone_answers_and_equal_scores_teach_nothing(name):
    """A lone answer, and groups of 3 and 5 equal scores that float32 cannot add up exactly: 0, to the last bit.

    Would not catch a step that is taken for nothing.
    """
    scores, groups = torch.tensor([5.0] + [0.1] * 3 + [-0.7] * 5), torch.tensor([0] + [1] * 3 + [2] * 5)
    ones = torch.ones(9, dtype=torch.int64)
    samples = Samples(scores, ones, groups, scores, greedy_scores=scores)
    for norm_by_std in (True, False):
        advantages, _ = ESTIMATORS[name](samples, AlgorithmConfig(norm_adv_by_std_in_grpo=norm_by_std))
        assert advantages.tolist() == [0.0] * 9


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("scores", [[0.0] * 4, [0.1] * 4, [1.0] * 4])
def test_equal_scores_everywhere(name, scores):
    """Two groups of answers of different lengths, all with the same score: 0, to the last bit.

    Would not catch what such a step costs.
    """
    lengths, groups, scores = torch.tensor([1, 3, 2, 2]), torch.tensor([0, 0, 1, 1]), torch.tensor(scores)
    rewards = torch.zeros(8)
    rewards[lengths.cumsum(0) - 1] = scores
    samples = Samples(rewards, lengths, groups, scores, values=torch.zeros(8), greedy_scores=scores)
    advantages, returns = ESTIMATORS[name](samples, AlgorithmConfig(adv_estimator=name))
    assert advantages.isfinite().all() and returns.isfinite().all()
    assert not advantages.any()


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


def whitened(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [0.0] * len(values)
    scale = (statistics.variance(values) + 1e-8) ** -0.5
    return [(value - statistics.fmean(values)) * scale for value in values]


def to_go(row: list[float], gamma: float) -> list[float]:
    return [sum(gamma**n * r for n, r in enumerate(row[t:])) for t in range(len(row))]


def of_answers(batch: Batch, advantage) -> list[float]:
    return [advantage(row) for row, length in enumerate(batch.lengths) for _ in range(length)]


def loop_grpo(batch: Batch, config: AlgorithmConfig) -> list[float]:
    def advantage(row: int) -> float:
        group = [batch.totals[other] for other in batch.others(row)]
        centred = batch.totals[row] - statistics.fmean(group)
        if not config.norm_adv_by_std_in_grpo:
            return centred
        return centred / ((statistics.stdev(group) if len(group) > 1 else 0.0) + 1e-6)

    return of_answers(batch, advantage)


def loop_rloo(batch: Batch, config: AlgorithmConfig) -> list[float]:
    def advantage(row: int) -> float:
        rest = [batch.totals[other] for other in batch.others(row) if other != row]
        return batch.totals[row] - statistics.fmean(rest) if rest else 0.0

    return of_answers(batch, advantage)


def loop_opo(batch: Batch, config: AlgorithmConfig) -> list[float]:
    def advantage(row: int) -> float:
        tokens = [batch.totals[other] for other in batch.others(row) for _ in range(batch.lengths[other])]
        return batch.totals[row] - statistics.fmean(tokens)

    return of_answers(batch, advantage)


def loop_reinforce(batch: Batch, config: AlgorithmConfig) -> list[float]:
    return whitened([value for row in batch.rewards for value in to_go(row, config.gamma)])


def loop_baseline(batch: Batch, config: AlgorithmConfig) -> list[float]:
    def advantage(row: int) -> float:
        return batch.totals[row] - statistics.fmean(batch.totals[other] for other in batch.others(row))

    return whitened(of_answers(batch, advantage))


def loop_remax(batch: Batch, config: AlgorithmConfig) -> list[float]:
    rows = zip(batch.rewards, batch.greedy, strict=True)
    return [value - greedy for row, greedy in rows for value in to_go(row, 1.0)]


def loop_gae(batch: Batch, config: AlgorithmConfig) -> list[float]:
    found = []
    for rewards, values in zip(batch.rewards, batch.values, strict=True):
        after = [*values[1:], 0.0][: len(values)]
        deltas = [r + config.gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
        found += to_go(deltas, config.gamma * config.lam)
    return whitened(found)


LOOPS = {
    "gae": loop_gae,
    "grpo": loop_grpo,
    "rloo": loop_rloo,
    "opo": loop_opo,
    "reinforce_plus_plus": loop_reinforce,
    "reinforce_plus_plus_baseline": loop_baseline,
    "remax": loop_remax,
}


@pytest.mark.parametrize("name", LOOPS)
@settings(max_examples=60, deadline=None)
@given(batch=batches())
def test_agrees_with_a_loop(name, batch: Batch):
    """Python floats, with and without standard deviation. Would not catch an error shared with the formula."""
    samples = Samples(
        flat(batch.rewards),
        torch.tensor(batch.lengths),
        torch.tensor(batch.groups),
        torch.tensor(batch.totals, dtype=torch.float64),
        flat(batch.values),
        torch.tensor(batch.greedy, dtype=torch.float64),
    )
    for norm_by_std in (True, False):
        config = AlgorithmConfig(gamma=0.9, lam=0.8, norm_adv_by_std_in_grpo=norm_by_std)
        advantages, returns = ESTIMATORS[name](samples, config)
        assert advantages.tolist() == pytest.approx(LOOPS[name](batch, config), rel=1e-6, abs=1e-6)
        assert returns.shape == advantages.shape and all(map(math.isfinite, returns.tolist()))


def test_every_name_has_a_function_and_a_loop():
    """Would not catch needs that are wrong."""
    assert set(ESTIMATORS) == set(ADV_ESTIMATORS) == set(LOOPS)
