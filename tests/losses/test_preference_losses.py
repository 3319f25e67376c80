"""DPO, IPO, SimPO, ORPO and KTO against hand-computed numbers and against the papers' formulas in Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slopes import slopes

from megatron_rl.config.declarations import PREFERENCE_LOSSES
from megatron_rl.config.tasks import DPOConfig
from megatron_rl.losses import preferences
from megatron_rl.losses.preferences import kto_baseline
from megatron_rl.losses.terms import Answers, Pairs

LOG2, LOG3 = math.log(2), math.log(3)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def one(*values: float) -> list[torch.Tensor]:
    return [torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in values]


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta, label_smoothing=0.0):
    config = DPOConfig(beta=beta, label_smoothing=label_smoothing)
    return preferences.dpo_loss(Pairs(chosen, rejected, ref_chosen, ref_rejected), config)


def ipo_loss(chosen, rejected, ref_chosen, ref_rejected, beta):
    return preferences.ipo_loss(Pairs(chosen, rejected, ref_chosen, ref_rejected), DPOConfig(beta=beta))


def simpo_loss(chosen, rejected, beta, gamma):
    config = DPOConfig(beta=beta, simpo_gamma=gamma)
    return preferences.simpo_loss(Pairs(chosen, rejected, chosen, rejected), config)


def orpo_loss(chosen, rejected, beta):
    return preferences.orpo_loss(Pairs(chosen, rejected, chosen, rejected), DPOConfig(beta=beta))


def kto_loss(policy, reference, labels, baseline, beta, desirable=1.0, undesirable=1.0):
    config = DPOConfig(beta=beta, desirable_weight=desirable, undesirable_weight=undesirable)
    sizes = torch.ones(len(policy), dtype=torch.int64)
    return preferences.kto_loss(Answers(policy, reference, labels, sizes, baseline), config)


def means(metrics) -> dict[str, float]:
    return {name: (total / count).item() for name, (total, count) in metrics.items()}


def test_dpo_by_hand():
    """Log-ratios log 3 / 0.1 and 0 at beta 0.1 make h = log 3: sigmoid 3/4. Would not catch summed against mean.

    The gradient to chosen is -beta (1 - 3/4), and none reaches the reference.
    """
    chosen, rejected, ref_chosen, ref_rejected = one(10 * LOG3 - 5, -7.0, -5.0, -7.0)
    terms = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.1)
    assert terms.loss.item() == pytest.approx(math.log(4 / 3))
    found = torch.autograd.grad(terms.loss.sum(), (chosen, rejected, ref_chosen, ref_rejected), allow_unused=True)
    assert [one.item() for one in found[:2]] == pytest.approx([-0.025, 0.025]) and found[2:] == (None, None)
    assert means(terms.metrics) == pytest.approx({"accuracy": 1.0, "margin": LOG3, "chosen": LOG3, "rejected": 0.0})
    smooth = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.1, label_smoothing=0.25)
    assert smooth.loss.item() == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))


def test_label_smoothing_pulls_back_beyond_its_odds():
    """With e = 1/4 the loss is least at sigmoid(h) = 3/4, so h = log 3 has no gradient. Would not catch beta."""
    chosen, rejected, *reference = one(LOG3, 0.0, 0.0, 0.0)
    loss = dpo_loss(chosen, rejected, *reference, beta=1.0, label_smoothing=0.25).loss.sum()
    assert torch.autograd.grad(loss, chosen)[0].item() == pytest.approx(0.0, abs=1e-12)


def test_ipo_by_hand():
    """At beta 0.25 the target is 2; a difference of 3 is 1 too far: loss 1, gradient 2. Would not catch its sign."""
    chosen, rejected, *reference = one(-1.0, -5.0, -2.0, -3.0)
    terms = ipo_loss(chosen, rejected, *reference, beta=0.25)
    assert terms.loss.item() == pytest.approx(1.0)
    assert [g.item() for g in torch.autograd.grad(terms.loss.sum(), (chosen, rejected))] == pytest.approx([2.0, -2.0])
    assert means(terms.metrics) == pytest.approx({"accuracy": 1.0, "margin": 0.75, "chosen": 0.25, "rejected": -0.5})


def test_simpo_by_hand():
    """beta 2, means -1 and -1.5, gamma 1: just the margin, sigmoid(0). Would not catch TRL's gamma / beta."""
    chosen, rejected = one(-1.0, -1.5)
    terms = simpo_loss(chosen, rejected, beta=2.0, gamma=1.0)
    assert terms.loss.item() == pytest.approx(LOG2)
    assert [g.item() for g in torch.autograd.grad(terms.loss.sum(), (chosen, rejected))] == pytest.approx([-1.0, 1.0])
    assert means(terms.metrics) == pytest.approx({"accuracy": 1.0, "margin": 1.0, "chosen": -2.0, "rejected": -3.0})


def test_orpo_by_hand():
    """p = 3/4 and 1/2: odds 3 and 1, sigmoid(log 3) = 3/4, so the loss is -(1 + beta) log(3/4).

    Would not catch a mean taken over the tokens of a batch.
    """
    chosen, rejected = one(math.log(0.75), math.log(0.5))
    terms = orpo_loss(chosen, rejected, beta=0.1)
    assert terms.loss.item() == pytest.approx(1.1 * math.log(4 / 3))
    assert means(terms.metrics)["log_odds"] == pytest.approx(LOG3)
    assert means(terms.metrics)["nll"] == pytest.approx(math.log(4 / 3))


def test_orpo_of_a_certain_answer_is_finite():
    """p = 1 has infinite odds. Would not catch a limit that reaches ordinary answers."""
    chosen, rejected = one(0.0, 0.0)
    loss = orpo_loss(chosen, rejected, beta=0.1).loss.sum()
    gradients = torch.autograd.grad(loss, (chosen, rejected))
    assert math.isfinite(loss.item()) and all(math.isfinite(one.item()) for one in gradients)


def test_kto_by_hand():
    """Log-ratios 1 + log 3 and 1 - log 3 around a baseline of 1 at beta 1: both are 1 - 3/4, weighed 1 and 2.

    Gradients: -w p (1 - p) for the desirable one, the opposite for the other. Would not catch a wrong baseline.
    """
    policy = torch.tensor([1 + LOG3, 1 - LOG3], dtype=torch.float64, requires_grad=True)
    reference, labels = torch.zeros(2, dtype=torch.float64), torch.tensor([1, 0])
    terms = kto_loss(policy, reference, labels, torch.tensor(1.0, dtype=torch.float64), 1.0, 1.0, 2.0)
    assert terms.loss.tolist() == pytest.approx([0.25, 0.5])
    assert torch.autograd.grad(terms.loss.sum(), policy)[0].tolist() == pytest.approx([-3 / 16, 6 / 16])
    assert means(terms.metrics) == pytest.approx({"chosen": 1 + LOG3, "rejected": 1 - LOG3, "kl": 1.0})


def test_kto_baseline_is_a_mean_that_is_not_negative():
    """6 / 4, 0 for a negative mean, 0 of nothing, and no gradient. Would not catch pairs that are matched."""
    total = torch.tensor(6.0, requires_grad=True)
    assert kto_baseline(total, 4).item() == 1.5 and not kto_baseline(total, 4).requires_grad
    assert kto_baseline(torch.tensor(-6.0), 4).item() == 0.0
    assert kto_baseline(torch.tensor(0.0), 0).item() == 0.0


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x >= 0 else x - math.log1p(math.exp(x))


def dpo(c, r, rc, rr):
    h = 0.3 * ((c - rc) - (r - rr))
    return -0.9 * log_sigmoid(h) - 0.1 * log_sigmoid(-h)


def orpo(c, r, _, __):
    odds_c, odds_r = (math.exp(x) / (1 - math.exp(x)) for x in (c, r))
    return -c - 0.4 * log_sigmoid(math.log(odds_c / odds_r))


FORMULAS = {
    "dpo": (dpo, lambda c, r, rc, rr: dpo_loss(c, r, rc, rr, 0.3, 0.1)),
    "ipo": (lambda c, r, rc, rr: (c - rc - r + rr - 1 / 0.6) ** 2, lambda *args: ipo_loss(*args, 0.3)),
    "simpo": (
        lambda c, r, _, __: -log_sigmoid(2.5 * (c - r) - 0.7),
        lambda c, r, _, __: simpo_loss(c, r, 2.5, 0.7),
    ),
    "orpo": (orpo, lambda c, r, _, __: orpo_loss(c, r, 0.4)),
}
log_prob = st.floats(-9, -0.01)


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(*[log_prob] * 4), min_size=1, max_size=5))
def test_pairs_agree_with_the_papers_formulas(name, rows):
    """Losses and gradients in float64. Would not catch a formula that was misread in both places."""
    by_hand, function = FORMULAS[name]
    chosen, rejected, *reference = (column.clone() for column in torch.tensor(rows, dtype=torch.float64).T)
    policy = torch.stack([chosen, rejected]).requires_grad_()
    loss = function(policy[0], policy[1], *reference).loss
    assert loss.tolist() == pytest.approx([by_hand(*row) for row in rows], rel=1e-9, abs=1e-9)
    gradient = torch.autograd.grad(loss.sum(), policy)[0]
    for number, (c, r, *others) in enumerate(rows):
        expected = slopes(lambda pair, others=others: by_hand(*pair, *others), [c, r], 1e-7)
        assert gradient[:, number].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


answer = st.tuples(log_prob, log_prob, st.booleans())


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(answer, min_size=1, max_size=6), baseline=st.floats(0, 3))
def test_kto_agrees_with_the_papers_formula(rows, baseline):
    """Losses, gradients and which reward is whose, in float64. Would not catch how the baseline is estimated."""

    def loss_of(value: float, reference: float, good: bool) -> float:
        distance = 0.5 * (value - reference - baseline)
        return 1.33 * (1 - sigmoid(distance)) if good else 0.75 * (1 - sigmoid(-distance))

    policy, reference = (torch.tensor([row[k] for row in rows], dtype=torch.float64) for k in range(2))
    policy.requires_grad_()
    labels = torch.tensor([row[2] for row in rows])
    terms = kto_loss(policy, reference, labels, torch.tensor(baseline, dtype=torch.float64), 0.5, 1.33, 0.75)
    assert terms.loss.tolist() == pytest.approx([loss_of(*row) for row in rows], rel=1e-9)
    expected = [slopes(lambda x, row=row: loss_of(x[0], *row[1:]), [row[0]])[0] for row in rows]
    assert torch.autograd.grad(terms.loss.sum(), policy)[0].tolist() == pytest.approx(expected, abs=1e-6)
    good = [0.5 * (value - ref) for value, ref, label in rows if label]
    assert terms.metrics["chosen"].tolist() == pytest.approx([sum(good), len(good)])


def test_no_pairs_are_no_loss():
    """Empty micro-batches, of every loss. Would not catch a metric that is divided by 0 later."""
    none = torch.empty(0)
    for terms in (
        dpo_loss(none, none, none, none, 0.1),
        ipo_loss(none, none, none, none, 0.1),
        simpo_loss(none, none, 2.0, 1.0),
        orpo_loss(none, none, 0.1),
        kto_loss(none, none, none, torch.tensor(0.0), 0.1),
    ):
        assert terms.loss.sum().item() == 0.0
        assert all(one.tolist() == [0.0, 0.0] for one in terms.metrics.values())


def test_every_loss_says_what_it_needs():
    """Those above and no others. Would not catch a need that is wrong."""
    assert set(PREFERENCE_LOSSES) == {*FORMULAS, "kto"}
    assert [name for name, declared in PREFERENCE_LOSSES.items() if declared.traits.alone] == ["kto"]
