"""PPO's clipped policy objective and the KL estimator."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.losses.kl import kl_k1
from megatron_rl.losses.policy import ppo_clip

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
    terms = ppo_clip(new, old, advantages, clip_ratio=0.2)
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
    terms = ppo_clip(new, old, torch.tensor([advantage], dtype=torch.float64), clip_ratio)
    assert terms.loss.item() == pytest.approx(-gain, abs=1e-9)
    assert terms.loss.item() >= -advantage * ratio - 1e-9


def test_k1_is_unbiased():
    """Its mean under p over all four tokens is KL(p | q). Would not catch a wrong sum over a sequence."""
    p, q = torch.tensor([0.5, 0.25, 0.125, 0.125]), torch.tensor([0.25, 0.25, 0.25, 0.25])
    estimates = kl_k1(p.log(), q.log())
    torch.testing.assert_close(estimates, torch.tensor([1.0, 0.0, -1.0, -1.0]) * math.log(2))
    assert float((p * estimates).sum()) == pytest.approx(0.25 * math.log(2), abs=1e-6)


def test_enormous_ratio_stays_finite():
    """A log-ratio of 200, both signs and none of advantage. Would not catch a limit that is too low to matter."""
    log_probs = torch.tensor([0.0, 0.0, 0.0], requires_grad=True)
    terms = ppo_clip(log_probs, torch.full((3,), -200.0), torch.tensor([1.0, 0.0, -1.0]), clip_ratio=0.2)
    terms.loss.sum().backward()
    assert terms.loss[:2].tolist() == pytest.approx([-1.2, 0.0])
    assert log_probs.grad.tolist() == [0.0, 0.0, 0.0]
