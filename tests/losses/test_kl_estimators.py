"""Estimators of the KL to the reference from one sampled token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.declarations import KL_ESTIMATES
from megatron_rl.losses.kl import importance_weighted

KL_ESTIMATORS = {name: declared.function for name, declared in KL_ESTIMATES.items()}

P, Q = torch.tensor([0.5, 0.25, 0.125, 0.125]), torch.tensor([0.25, 0.25, 0.25, 0.25])
TRUE_KL = 0.25 * math.log(2)
LOG2 = math.log(2)

#  on the four tokens: log p - log q = log 2, 0, -log 2, -log 2
BY_HAND = {
    "kl": [LOG2, 0.0, -LOG2, -LOG2],
    "abs": [LOG2, 0.0, LOG2, LOG2],
    "mse": [LOG2**2 / 2, 0.0, LOG2**2 / 2, LOG2**2 / 2],
    "low_var_kl": [0.5 - 1 + LOG2, 0.0, 2 - 1 - LOG2, 2 - 1 - LOG2],
}
SAME = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_by_hand(name):
    """Four tokens under every name. Would not catch a gradient that is wrong where the value is right."""
    plain = name.removesuffix("+")
    expected = BY_HAND[SAME.get(plain, plain)]
    assert KL_ESTIMATORS[name](P.log(), Q.log()).tolist() == pytest.approx(expected, abs=1e-6)


def test_names():
    """verl's, each with and without a +. Would not catch two names that are swapped."""
    plain = {*BY_HAND, *SAME}
    assert set(KL_ESTIMATORS) == plain | {f"{name}+" for name in plain}


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased(name):
    """Their mean under p over all four tokens is KL(p | q). Would not catch a wrong sum over a sequence."""
    assert float((P * KL_ESTIMATORS[name](P.log(), Q.log())).sum()) == pytest.approx(TRUE_KL, abs=1e-6)


def test_importance_weights_make_the_gradient_unbiased():
    """Four tokens, samples of an old policy: the mean of value and gradient is that of KL(p | q) itself, for k1 and k3.

    The gradient to the logits is p_i (log p_i / q_i - KL). Would not catch a limit that is too low.
    """
    old = torch.tensor([0.25, 0.25, 0.4, 0.1])
    expected = P * (P.log() - Q.log() - TRUE_KL)
    for name in ("k1", "k3"):
        logits = P.log().requires_grad_()
        log_p = logits.log_softmax(0)
        mean = (old * importance_weighted(KL_ESTIMATORS[name](log_p, Q.log()), log_p, old.log())).sum()
        assert mean.item() == pytest.approx(TRUE_KL, abs=1e-6)
        assert torch.autograd.grad(mean, logits)[0].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


LOOPS = {
    "k1": lambda p, q: p - q,
    "abs": lambda p, q: abs(p - q),
    "k2": lambda p, q: (p - q) ** 2 / 2,
    "k3": lambda p, q: min(math.exp(q - p) - 1 - (q - p), 10.0),
}


@given(pairs=st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), min_size=1, max_size=20))
def test_agrees_with_python_floats(pairs):
    """Float64 on both sides. Would not catch rounding in float32."""
    log_p, log_q = torch.tensor(pairs, dtype=torch.float64).T
    for name, loop in LOOPS.items():
        expected = [loop(p, q) for p, q in pairs]
        assert KL_ESTIMATORS[name](log_p, log_q).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_k3_stays_finite_and_small():
    """Log-ratios of 200 either way. Would not catch a limit that cuts ordinary tokens."""
    assert KL_ESTIMATORS["k3"](torch.tensor([-200.0, 0.0]), torch.tensor([0.0, -200.0])).tolist() == [10.0, 10.0]


def test_gradient_of_k2_is_the_kls():
    """Over all tokens, sum_p of its gradient with respect to logits is that of KL(p | q). Would not catch k1's."""
    logits = P.log().clone().requires_grad_()
    log_p = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((log_p.exp() * (log_p - Q.log())).sum(), logits)
    log_p = logits.log_softmax(0)
    (found,) = torch.autograd.grad((P * KL_ESTIMATORS["k2"](log_p, Q.log())).sum(), logits)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", [name for name in KL_ESTIMATORS if name.endswith("+")])
@given(pairs=st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), min_size=1, max_size=20))
def test_straight_through(name, pairs):
    """The value of the plain estimator and log p - log q for a gradient, in float64. Would not catch a wrong weight."""
    log_p, log_q = torch.tensor(pairs, dtype=torch.float64).T
    log_p = log_p.clone().requires_grad_()
    found = KL_ESTIMATORS[name](log_p, log_q)
    plain = KL_ESTIMATORS[name.removesuffix("+")](log_p, log_q)
    assert found.tolist() == pytest.approx(plain.tolist(), rel=1e-12, abs=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), log_p)
    assert gradient.tolist() == pytest.approx([p - q for p, q in pairs], abs=1e-12)
