"""Losses of preferences against hand-computed numbers and against the papers' formulas in Python floats."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slopes import slopes

from megatron_rl.config.declarations import PREFERENCE_LOSSES
from megatron_rl.config.tasks import F_DIVERGENCES, DPOConfig
from megatron_rl.losses import preferences
from megatron_rl.losses.objectives import preference_objective
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
    return preferences.kto_loss(Answers(policy, reference, labels, sizes, baseline, sizes), config)


def pair_loss(name, *log_probs, **keys):
    """Any loss of pairs, by its name."""
    return PREFERENCE_LOSSES[name].function(Pairs(*log_probs), DPOConfig(**keys))


def found(terms, *policy) -> list[float]:
    """The loss of one pair, and its gradients."""
    gradients = torch.autograd.grad(terms.loss.sum(), policy)
    return [terms.loss.item(), *(one.item() for one in gradients)]


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


def test_robust_by_hand():
    """e = 1/4 at h = log 3: (3/4 log(4/3) - 1/4 log 4) / (1/2), gradient (-3/4 * 1/4 - 1/4 * 3/4) / (1/2) = -3/4.

    Would not catch e and 1 - e exchanged with the sign of h.
    """
    chosen, rejected, *reference = one(LOG3, 0.0, 0.0, 0.0)
    terms = pair_loss("robust", chosen, rejected, *reference, beta=1.0, label_smoothing=0.25)
    loss = 1.5 * math.log(4 / 3) - 0.5 * math.log(4)
    assert found(terms, chosen, rejected) == pytest.approx([loss, -0.75, 0.75])


def test_robust_is_unbiased():
    """A share e of flipped labels has in the mean dpo's loss on right ones, which smoothed dpo has not.

    Would not catch a loss that is right for this e alone.
    """
    right, flipped = one(1.3, -0.4, -0.2, 0.1), one(-0.4, 1.3, 0.1, -0.2)
    keys = {"beta": 0.7, "label_smoothing": 0.2}
    mean = {
        name: 0.8 * pair_loss(name, *right, **keys).loss.item() + 0.2 * pair_loss(name, *flipped, **keys).loss.item()
        for name in ("robust", "dpo")
    }
    clean = pair_loss("dpo", *right, beta=0.7).loss.item()
    assert mean["robust"] == pytest.approx(clean) and abs(mean["dpo"] - clean) > 0.01


def test_hinge_by_hand():
    """beta 0.5, log-ratios 1 and 0.5: 1 - 0.25, slope -+0.5; 3 apart is beyond the margin of 2. Would not catch beta as
    the margin itself, but for the 3."""
    chosen, rejected, *reference = one(0.0, -0.5, -1.0, -1.0)
    terms = pair_loss("hinge", chosen, rejected, *reference, beta=0.5)
    assert found(terms, chosen, rejected) == pytest.approx([0.75, -0.5, 0.5])
    assert means(terms.metrics) == pytest.approx({"accuracy": 1.0, "margin": 0.25, "chosen": 0.5, "rejected": 0.25})
    chosen, rejected, *reference = one(0.0, -3.0, -1.0, -1.0)
    assert found(pair_loss("hinge", chosen, rejected, *reference, beta=0.5), chosen, rejected) == [0.0, 0.0, 0.0]


def test_apo_by_hand():
    """r = log 3 and -log 3: zero 1/4 + 1/4, each with slope 3/16 towards its own side; down 3/4 + 1/10, as their
    difference is log 9, slopes 3/16 - 9/100 and 9/100. Would not catch an anchor that is not 0."""
    chosen, rejected, *reference = one(LOG3, -LOG3, 0.0, 0.0)
    zero = pair_loss("apo_zero", chosen, rejected, *reference, beta=1.0)
    assert found(zero, chosen, rejected) == pytest.approx([0.5, -3 / 16, 3 / 16])
    down = pair_loss("apo_down", chosen, rejected, *reference, beta=1.0)
    assert found(down, chosen, rejected) == pytest.approx([0.85, 3 / 16 - 0.09, 0.09])


def test_sppo_hard_by_hand():
    """beta 0.25 aims at 2 and -2; log-ratios 1 and -3 are 1 short and 1 beyond. Would not catch one goal for both."""
    chosen, rejected, *reference = one(1.0, -3.0, 0.0, 0.0)
    terms = pair_loss("sppo_hard", chosen, rejected, *reference, beta=0.25)
    assert found(terms, chosen, rejected) == pytest.approx([2.0, -2.0, -2.0])
    assert means(terms.metrics) == pytest.approx({"accuracy": 1.0, "margin": 1.0, "chosen": 0.25, "rejected": -0.75})


def test_nca_pair_by_hand():
    """r = log 3 and 0: log(4/3) + (log 4 + log 2) / 2, slopes -1/4 + 3/8 and 1/4. Would not catch the halves left out
    of an answer at 0."""
    chosen, rejected, *reference = one(LOG3, 0.0, 0.0, 0.0)
    terms = pair_loss("nca_pair", chosen, rejected, *reference, beta=1.0)
    loss = math.log(4 / 3) + 1.5 * LOG2
    assert found(terms, chosen, rejected) == pytest.approx([loss, 1 / 8, 1 / 4])


def test_sft_by_hand():
    """The chosen answer's mean log-prob alone. Would not catch a mean over tokens of several answers."""
    chosen, rejected = one(-1.5, -9.0)
    terms = pair_loss("sft", chosen, rejected, chosen, rejected)
    assert terms.loss.item() == 1.5 and means(terms.metrics) == {"nll": 1.5}


def test_divergences_by_hand():
    """u = 2 and 1/2: f' is 1 - 1/u = 1/2 and -1; log(4/3) and log(2/3); with a = 1/2 2 (1 - u^-1/2), whose limits are
    log u and the forward KL. Would not catch slopes, which the formulas below have."""
    chosen, rejected, *reference = one(LOG2, -LOG2, 0.0, 0.0)

    def rewards(kind: str, coefficient: float = 0.5) -> list[float]:
        keys = {"f_divergence_type": kind, "f_alpha_divergence_coef": coefficient}
        told = means(pair_loss("dpo", chosen, rejected, *reference, beta=1.0, **keys).metrics)
        return [told["chosen"], told["rejected"]]

    assert rewards("reverse_kl") == pytest.approx([LOG2, -LOG2])
    assert rewards("forward_kl") == pytest.approx([0.5, -1.0])
    assert rewards("js_divergence") == pytest.approx([math.log(4 / 3), math.log(2 / 3)])
    assert rewards("alpha_divergence") == pytest.approx([2 - math.sqrt(2), 2 - 2 * math.sqrt(2)])
    assert rewards("alpha_divergence", 1e-6) == pytest.approx(rewards("reverse_kl"), rel=1e-5)
    assert rewards("alpha_divergence", 1.0) == rewards("forward_kl")


@pytest.mark.parametrize("name", ["dpo", "hinge", "robust", "ipo"])
def test_an_answer_far_below_the_reference_is_finite(name):
    """log u = -300 in float32, whose 1 / u overflows. Would not catch a limit that reaches ordinary answers."""
    chosen, rejected, *reference = (torch.tensor([value], requires_grad=True) for value in (-300.0, -1.0, 0.0, 0.0))
    terms = pair_loss(name, chosen, rejected, *reference, f_divergence_type="forward_kl")
    assert all(map(math.isfinite, found(terms, chosen, rejected)))


def answers(**changes) -> Answers:
    """Two prompts of two and three answers, but for the changes."""
    draw = torch.Generator().manual_seed(1)
    numbers, given = (-9 * torch.rand(5, generator=draw, dtype=torch.float64) for _ in range(2))
    sizes, lengths = torch.tensor([2, 3]), torch.tensor([3, 2, 5, 1, 4])
    told = Answers(numbers, given, given, sizes, torch.zeros((), dtype=torch.float64), lengths)
    return dataclasses.replace(told, **changes)


def test_several_losses_are_their_weighted_sum():
    """0.8 dpo + 0.5 sft, of sums and of means of log-probs; metrics under each name, the losses before their weights.

    Would not catch a gradient that differs from the value's.
    """
    told = answers()
    terms = preference_objective(DPOConfig(loss=["dpo", "sft"], loss_weights=[0.8, 0.5]))(told)
    dpo, sft = (preference_objective(DPOConfig(loss=[name]))(told) for name in ("dpo", "sft"))
    assert terms.loss.tolist() == pytest.approx((0.8 * dpo.loss + 0.5 * sft.loss).tolist())
    by_hand = -(told.numbers[0] / 3), -(2 * told.numbers[2] / 5 + told.numbers[3]) / 3
    assert sft.loss.tolist() == pytest.approx([float(one) for one in by_hand])
    names = {f"dpo/{name}" for name in ("loss", "accuracy", "margin", "chosen", "rejected")}
    assert terms.metrics.keys() == names | {"sft/loss", "sft/nll"}
    assert terms.metrics["sft/loss"].tolist() == pytest.approx([float(sft.loss.sum()), 2])
    assert terms.metrics["dpo/accuracy"].equal(dpo.metrics["accuracy"])
    plain = preference_objective(DPOConfig(loss=["dpo", "sft"]))(told)
    assert plain.loss.tolist() == pytest.approx((dpo.loss + sft.loss).tolist())
    twice = preference_objective(DPOConfig(loss=["dpo"], loss_weights=[2.0]))(told)
    assert twice.loss.tolist() == (2 * dpo.loss).tolist() and twice.metrics.keys() == dpo.metrics.keys()


@pytest.mark.parametrize("names", [*([name] for name in PREFERENCE_LOSSES), ["dpo", "sft", "hinge"]], ids="+".join)
def test_losses_do_not_depend_on_micro_batches(names):
    """Prompts apart and together: losses, and the sums of metrics. Would not catch a loss that reads other prompts of
    both alike."""
    is_alone = names == ["kto"]
    sizes = torch.ones(5, dtype=torch.int64) if is_alone else torch.tensor([2, 3])
    whole = answers(sizes=sizes, labels=torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64))
    objective, edges = preference_objective(DPOConfig(loss=names, beta=0.3)), [0, *sizes.cumsum(0).tolist()]
    parts = []
    for number, (first, end) in enumerate(zip(edges, edges[1:], strict=False)):
        columns = {name: getattr(whole, name)[first:end] for name in ("numbers", "given", "labels", "lengths")}
        parts.append(objective(answers(**columns, sizes=sizes[number : number + 1])))
    together = objective(whole)
    assert torch.cat([part.loss for part in parts]).tolist() == pytest.approx(together.loss.tolist(), rel=1e-12)
    for name, total in together.metrics.items():
        assert sum(part.metrics[name] for part in parts).tolist() == pytest.approx(total.tolist(), rel=1e-12), name


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


def f_prime(kind: str, x: float) -> float:
    u = math.exp(x)
    if kind == "alpha_divergence":
        return (1 - u**-0.3) / 0.3
    return {"forward_kl": 1 - 1 / u, "js_divergence": math.log(2 * u / (1 + u)), "reverse_kl": x}[kind]


BETA = 0.37
"""Not a number that Hypothesis draws: no log-ratios are just at the hinge."""


def by_name(name: str, formula, scale: float = 1.0, **keys):
    """A formula of both log-ratios, and the loss, of log-probs times `scale`."""
    return (
        lambda c, r, rc, rr: formula(scale * (c - rc), scale * (r - rr)),
        lambda *log_probs: pair_loss(
            name, *(scale * one for one in log_probs), beta=BETA, f_alpha_divergence_coef=0.3, **keys
        ),
    )


def of_difference(name: str, formula, **keys) -> dict:
    """A loss of h, with every divergence, of ratios that are not so far apart that slopes are lost in rounding."""
    return {
        f"{name} {kind}": by_name(
            name,
            lambda c, r, kind=kind: formula(BETA * (f_prime(kind, c) - f_prime(kind, r))),
            1 / 6,
            **keys,
            f_divergence_type=kind,
        )
        for kind in F_DIVERGENCES
    }


FORMULAS = {
    "dpo": (dpo, lambda c, r, rc, rr: dpo_loss(c, r, rc, rr, 0.3, 0.1)),
    "ipo": (lambda c, r, rc, rr: (c - rc - r + rr - 1 / 0.6) ** 2, lambda *args: ipo_loss(*args, 0.3)),
    "simpo": (
        lambda c, r, _, __: -log_sigmoid(2.5 * (c - r) - 0.7),
        lambda c, r, _, __: simpo_loss(c, r, 2.5, 0.7),
    ),
    "orpo": (orpo, lambda c, r, _, __: orpo_loss(c, r, 0.4)),
    **of_difference("dpo", lambda h: -log_sigmoid(h)),
    **of_difference("hinge", lambda h: max(0.0, 1 - h)),
    **of_difference("ipo", lambda h: ((h - 0.5) / BETA) ** 2),
    **of_difference("robust", lambda h: (-0.9 * log_sigmoid(h) + 0.1 * log_sigmoid(-h)) / 0.8, label_smoothing=0.1),
    "apo_zero": by_name("apo_zero", lambda c, r: 1 - sigmoid(BETA * c) + sigmoid(BETA * r)),
    "apo_down": by_name("apo_down", lambda c, r: sigmoid(BETA * c) + 1 - sigmoid(BETA * (c - r))),
    "sppo_hard": by_name("sppo_hard", lambda c, r: (c - 0.5 / BETA) ** 2 + (r + 0.5 / BETA) ** 2),
    "nca_pair": by_name(
        "nca_pair",
        lambda c, r: -log_sigmoid(BETA * c) - 0.5 * log_sigmoid(-BETA * c) - 0.5 * log_sigmoid(-BETA * r),
    ),
    "sft": (lambda c, r, _, __: -c, lambda *log_probs: pair_loss("sft", *log_probs)),
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
        *(pair_loss(name, none, none, none, none) for name in PREFERENCE_LOSSES if name != "kto"),
    ):
        assert terms.loss.sum().item() == 0.0
        assert all(one.tolist() == [0.0, 0.0] for one in terms.metrics.values())


def test_every_loss_says_what_it_needs():
    """Those above and no others. Would not catch a need that is wrong."""
    assert set(PREFERENCE_LOSSES) == {*(name.partition(" ")[0] for name in FORMULAS), "kto"}
    assert [name for name, declared in PREFERENCE_LOSSES.items() if declared.traits.alone] == ["kto"]
