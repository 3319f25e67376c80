"""Clipped policy objectives: of tokens, with two ranges and a dual clip, and of whole answers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import ActorConfig
from megatron_rl.losses.policy import PolicyTokens, gspo_loss, ppo_clip


def gspo(new, old, advantages, lengths, clip_low, clip_high, kept=None):
    config = ActorConfig(clip_ratio_low=clip_low, clip_ratio_high=clip_high)
    return gspo_loss(PolicyTokens(new, old, advantages, lengths, kept), config)


#  advantage, ratio, loss, clipped, d loss / d log_prob; clip_ratio is 0.2
CASES = [
    pytest.param(2.0, 1.5, -2.4, 1.0, 0.0, id="good action, already much likelier: clip decides"),
    pytest.param(2.0, 0.5, -1.0, 0.0, -1.0, id="good action, less likely: pull it up"),
    pytest.param(-2.0, 1.5, 3.0, 0.0, 3.0, id="bad action, likelier: push it down"),
    pytest.param(-2.0, 0.5, 1.6, 1.0, 0.0, id="bad action, already much less likely: clip decides"),
    pytest.param(2.0, 1.1, -2.2, 0.0, -2.2, id="good action inside the clip"),
    pytest.param(-2.0, 0.9, 1.8, 0.0, 1.8, id="bad action inside the clip"),
    pytest.param(3.0, 1.0, -3.0, 0.0, -3.0, id="ratio one: the plain policy gradient"),
    pytest.param(0.0, 1.5, 0.0, 0.0, 0.0, id="no advantage"),
]


@pytest.mark.parametrize(("advantage", "ratio", "loss", "clipped", "gradient"), CASES)
def test_both_signs_and_both_sides(advantage, ratio, loss, clipped, gradient):
    """Loss, clip mark, gradient and KL by hand. Would not catch a wrong sum over tokens."""
    old = torch.tensor([-2.0], requires_grad=True)
    new = torch.tensor([-2.0 + math.log(ratio)], requires_grad=True)
    advantages = torch.tensor([advantage], requires_grad=True)
    terms = ppo_clip(new, old, advantages, clip_low=0.2, clip_high=0.2)
    assert terms.loss.item() == pytest.approx(loss, abs=1e-6)
    assert terms.clipped.item() == clipped
    assert terms.kl.item() == pytest.approx(-math.log(ratio), abs=1e-6)
    (found,) = torch.autograd.grad(terms.loss.sum(), new)
    assert found.item() == pytest.approx(gradient, abs=1e-6)
    assert not terms.kl.requires_grad and not terms.clipped.requires_grad


@settings(max_examples=60, deadline=None)
@given(
    advantage=st.floats(-5, 5),
    log_ratio=st.floats(-2, 2),
    clip_ratio=st.sampled_from([0.0, 0.1, 0.2, 0.5]),
)
def test_is_minus_the_smaller_of_two_gains(advantage, log_ratio, clip_ratio):
    """Equation 7 in Python floats. Would not catch a wrong gradient."""
    ratio = math.exp(log_ratio)
    gain = min(ratio * advantage, min(max(ratio, 1 - clip_ratio), 1 + clip_ratio) * advantage)
    new, old = torch.tensor([log_ratio], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    terms = ppo_clip(new, old, torch.tensor([advantage], dtype=torch.float64), clip_ratio, clip_ratio)
    assert terms.loss.item() == pytest.approx(-gain, abs=1e-9)
    assert terms.loss.item() >= -advantage * ratio - 1e-9


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.tuples(st.floats(-3, 3), st.floats(-5, 5)), min_size=1, max_size=12),
    low=st.sampled_from([0.1, 0.2]),
    high=st.sampled_from([0.2, 0.28]),
    c=st.sampled_from([1.5, 3.0]),
)
def test_dual_clip_agrees_with_a_loop(tokens, low, high, c):
    """Python floats, both ranges and c. Would not catch a wrong gradient."""
    expected = []
    for log_ratio, advantage in tokens:
        ratio = math.exp(log_ratio)
        gain = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
        expected.append(-max(gain, c * advantage) if advantage < 0 else -gain)
    log_ratios, advantages = torch.tensor(tokens, dtype=torch.float64).T
    found = ppo_clip(log_ratios, torch.zeros_like(log_ratios), advantages, low, high, c).loss
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_enormous_ratio_stays_finite():
    """A log-ratio of 200, both signs and none of advantage. Would not catch a limit that is too low to matter."""
    log_probs = torch.tensor([0.0, 0.0, 0.0], requires_grad=True)
    terms = ppo_clip(log_probs, torch.full((3,), -200.0), torch.tensor([1.0, 0.0, -1.0]), 0.2, 0.2)
    terms.loss.sum().backward()
    assert terms.loss[:2].tolist() == pytest.approx([-1.2, 0.0])
    assert log_probs.grad.tolist() == [0.0, 0.0, 0.0]


#  advantage, ratio, loss, clipped, clipped by the dual clip, gradient; ranges 0.2 and 0.28, c = 3
ASYMMETRIC = [
    pytest.param(2.0, 1.25, -2.5, 0.0, 0.0, -2.5, id="above 1.2 and below 1.28: not clipped"),
    pytest.param(2.0, 1.5, -2.56, 1.0, 0.0, 0.0, id="above 1.28: clipped there"),
    pytest.param(-2.0, 0.75, 1.6, 1.0, 0.0, 0.0, id="below 0.8: clipped there"),
    pytest.param(-2.0, 2.9, 5.8, 0.0, 0.0, 5.8, id="bad action, ratio below c: pushed down"),
    pytest.param(-2.0, 5.0, 6.0, 0.0, 1.0, 0.0, id="bad action, ratio above c: the loss is at most c |A|"),
    pytest.param(2.0, 5.0, -2.56, 1.0, 0.0, 0.0, id="good action: no dual clip"),
]


@pytest.mark.parametrize(("advantage", "ratio", "loss", "clipped", "lower", "gradient"), ASYMMETRIC)
def test_two_ranges_and_dual_clip(advantage, ratio, loss, clipped, lower, gradient):
    """Loss, both marks and the gradient by hand. Would not catch c without effect in a file's own loss."""
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    terms = ppo_clip(new, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.28, 3.0)
    assert terms.loss.item() == pytest.approx(loss, abs=1e-5)
    assert (terms.clipped.item(), terms.clipped_lower.item()) == (clipped, lower)
    assert torch.autograd.grad(terms.loss.sum(), new)[0].item() == pytest.approx(gradient, abs=1e-5)


def test_gspo_by_hand():
    """Answers of 2 and 1 tokens, one empty between them. Would not catch a clip of tokens apart: they share a ratio.

    Log-ratios 0.3 and -0.1 have the mean 0.1, so both tokens have ratio e^0.1, inside 0.2; the third has e^0.5, clipped
    at 1.2. The gradient reaches every token of an answer alike: the ratio is that of all of them.
    """
    new = torch.tensor([0.3, -0.1, 0.5], requires_grad=True)
    terms = gspo(new, torch.zeros(3), torch.tensor([1.0, 1.0, 1.0]), torch.tensor([2, 0, 1]), 0.2, 0.2)
    ratio = math.exp(0.1)
    assert terms.loss.tolist() == pytest.approx([-ratio, -ratio, -1.2])
    assert terms.clipped.tolist() == [0.0, 0.0, 1.0] and terms.kl.tolist() == pytest.approx([-0.3, 0.1, -0.5])
    assert torch.autograd.grad(terms.loss.sum(), new)[0].tolist() == pytest.approx([-ratio, -ratio, 0.0])


rows = st.lists(st.lists(st.tuples(*[st.floats(-2, 2)] * 2), max_size=5), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(rows=rows, seed=st.integers(0, 99), low=st.sampled_from([0.02, 0.2]), high=st.sampled_from([0.03, 0.28]))
def test_whole_answers_have_the_gradient_of_the_papers_objective(rows, seed, low, high):
    """GSPO's eq. 5 on Python floats, its gradient by central differences. Would not catch unequal advantages."""
    advantages = torch.randn(len(rows), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()

    def objective(new: list[list[float]]) -> float:
        total = 0.0
        for row, old_row, advantage in zip(new, rows, advantages, strict=True):
            if not row:
                continue
            log_s = sum(x - old for x, (_, old) in zip(row, old_row, strict=True)) / len(row)
            s = math.exp(log_s)
            total -= min(s * advantage, min(max(s, 1 - low), 1 + high) * advantage) * len(row)
        return total

    new = [[x for x, _ in row] for row in rows]
    flat = torch.tensor([x for row in new for x in row], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([x for row in rows for _, x in row], dtype=torch.float64)
    lengths = torch.tensor([len(row) for row in rows])
    spread = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(lengths)
    loss = gspo(flat, old, spread, lengths, low, high).loss.sum()
    assert loss.item() == pytest.approx(objective(new), abs=1e-6)
    step = 1e-6
    found = torch.autograd.grad(loss, flat)[0].split(lengths.tolist())
    for r, row in enumerate(rows):
        if not row:
            continue
        ratio = math.exp(sum(x - old for x, old in row) / len(row))
        if min(abs(ratio - (1 - low)), abs(ratio - (1 + high))) < 1e-4:
            continue  # at a kink
        for t in range(len(row)):
            up, down = ([list(other) for other in new] for _ in range(2))
            up[r][t] += step
            down[r][t] -= step
            assert found[r][t].item() == pytest.approx((objective(up) - objective(down)) / (2 * step), abs=1e-5)
