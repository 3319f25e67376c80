"""Losses of distillation: numbers computed by hand, and gradients of whole distributions against torch's."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.config.declarations import DISTILLATION_LOSSES
from megatron_rl.config.distillation_keys import DistillationLossConfig
from megatron_rl.losses.distillation import GeneralisedJSD, MixedKL

LOG2 = math.log(2.0)
STUDENT, TEACHER = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
WHOLE = {
    "forward_kl": 0.25 * -LOG2 + 0.5 * LOG2,  # sum of q log(q / p)
    "reverse_kl": 0.5 * LOG2 - 0.25 * LOG2,
    "mixed_kl": 0.25 * LOG2,
    # m = (3/8, 3/8, 1/4): half of sum q log(q / m), and of sum p log(p / m), which are equal here
    "jsd": 0.25 * math.log(2 / 3) + 0.5 * math.log(4 / 3),
}


@pytest.mark.parametrize("mode", WHOLE)
def test_of_whole_distributions(mode):
    """Three tokens of probabilities 1/2, 1/4, 1/4 and 1/4, 1/2, 1/4. Would not catch an error of chunks or ranks."""
    kind = DISTILLATION_LOSSES[mode].function(DistillationLossConfig())
    assert float(kind.sums(STUDENT, TEACHER)[0]) == pytest.approx(WHOLE[mode], rel=1e-6)
    assert [float(part) for part in kind.sums(STUDENT, STUDENT)] == [0.0, 0.0]


def test_the_ends_of_jsd_are_both_kls():
    """At beta 0 and 1. Would not catch a wrong limit in between."""
    jsd = DISTILLATION_LOSSES["jsd"].function
    assert jsd(DistillationLossConfig(beta=0.0)) == MixedKL(0.0)
    assert jsd(DistillationLossConfig(beta=1.0)) == MixedKL(1.0)
    near = GeneralisedJSD(1e-4)
    assert float(near.sums(STUDENT, TEACHER)[0]) / 1e-4 == pytest.approx(WHOLE["forward_kl"], rel=1e-3)


@pytest.mark.parametrize("kind", [MixedKL(0.0), MixedKL(0.3), MixedKL(1.0), GeneralisedJSD(0.2)], ids=repr)
def test_gradients_are_those_of_the_values(kind):
    """With respect to logits, in float64, a token of probability 0 among them. Would not catch a wrong value."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 9, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = 2 * torch.randn(5, 9, generator=generator, dtype=torch.float64)
    teacher[0, 0] = -1e30
    teacher = teacher.log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    has_bound = kind == MixedKL(0.0) or isinstance(kind, GeneralisedJSD)
    rows = slice(0 if has_bound else 1, 5)  # where the teacher has no such token the reverse KL has no bound
    values, slope = kind.sums(log_probs[rows], teacher[rows])
    expected = torch.autograd.grad(values.sum(), logits)[0][rows]
    found = kind.gradient(log_probs[rows].detach(), teacher[rows], slope.detach()[:, None])
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


SAMPLED = {"k1": LOG2, "kl": LOG2, "abs": LOG2, "k2": LOG2**2 / 2, "mse": LOG2**2 / 2, "k3": 0.5 - 1 + LOG2}
SAMPLED["low_var_kl"] = SAMPLED["k3"]


@pytest.mark.parametrize("mode", SAMPLED)
def test_of_sampled_tokens(mode):
    """A token of 1/2 that the teacher gives 1/4. Would not catch a bound that is left out."""
    loss = DISTILLATION_LOSSES[mode].function
    assert float(loss(torch.tensor(0.5).log(), torch.tensor(0.25).log())) == pytest.approx(SAMPLED[mode], rel=1e-6)


@pytest.mark.parametrize(
    ("mode", "tail", "expected"),
    [
        # the teacher's best two have 1/2 and 1/4, which the student gives 1/4 and 1/2: 1/2 log 2 - 1/4 log 2
        ("forward_kl_topk", False, 0.25 * LOG2),
        ("forward_kl_topk", True, 0.25 * LOG2),  # both give the rest 1/4
        ("reverse_kl_topk", False, 0.25 * LOG2),
        ("reverse_kl_topk", True, 0.25 * LOG2),
    ],
)
def test_over_a_top_k(mode, tail, expected):
    """Would not catch ids that are another token's."""
    keys = DistillationLossConfig(topk_tail=tail)
    teachers, students = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.5]]).log()
    loss = DISTILLATION_LOSSES[mode].function
    assert float(loss(students, teachers, keys)) == pytest.approx(expected, rel=1e-5)
    assert float(loss(teachers, teachers, keys)) == 0.0


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("mode", ["forward_kl", "reverse_kl"])
def test_a_top_k_of_all_tokens_is_the_whole_distribution(mode, tail):
    """In any order, and in gradients. Would not catch a k that is not the vocabulary."""
    generator = torch.Generator().manual_seed(1)
    logits, teacher = torch.randn(2, 6, 11, generator=generator, dtype=torch.float64).unbind()
    logits.requires_grad_()
    log_probs, order = logits.log_softmax(-1), torch.randperm(11, generator=generator)
    teacher = teacher.log_softmax(-1)
    keys = DistillationLossConfig(topk_tail=tail, log_prob_min_clamp=None)
    cut = DISTILLATION_LOSSES[f"{mode}_topk"].function(log_probs[:, order], teacher[:, order], keys)
    whole, _ = DISTILLATION_LOSSES[mode].function(keys).sums(log_probs, teacher)
    torch.testing.assert_close(cut, whole)
    gradients = [torch.autograd.grad(values.sum(), logits, retain_graph=True)[0] for values in (cut, whole)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-6)


def test_the_rest_has_a_price():
    """A student that gives all but nothing to the teacher's two. Would not catch a bound in the wrong place."""
    keys = DistillationLossConfig(topk_tail=True, log_prob_min_clamp=-20.0)
    teachers, students = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.001, 0.001]]).log()
    expected = 0.5 * math.log(500) + 0.25 * math.log(250) + 0.25 * math.log(0.25 / 0.998)
    found = DISTILLATION_LOSSES["forward_kl_topk"].function(students, teachers, keys)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_log_probs_are_bounded_from_below():
    """At -10, which e^-12 does not reach. Would not catch a gradient beyond the bound."""
    teachers, students = torch.tensor([[0.0]]), torch.tensor([[-12.0]])
    loss = DISTILLATION_LOSSES["forward_kl_topk"].function
    assert float(loss(students, teachers, DistillationLossConfig(topk_tail=False))) == 10.0
    assert float(loss(students, teachers, DistillationLossConfig(topk_tail=False, log_prob_min_clamp=None))) == 12.0
