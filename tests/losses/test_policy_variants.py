"""Policy losses beside PPO's: by hand, and against Python floats in value and gradient, masks with holes included."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.algorithms import policy_agg_mode
from megatron_rl.config.correction import RolloutCorrectionConfig
from megatron_rl.config.declarations import POLICY_LOSSES
from megatron_rl.config.schema import LOSS_AGG_MODES, ActorConfig, PolicyLossConfig
from megatron_rl.losses.aggregate import BatchTotals, token_weights
from megatron_rl.losses.covariance import covariances
from megatron_rl.losses.policy import PolicyTerms, PolicyTokens, load_policy_loss, sequence_mask


def actor(loss_mode: str, **keys: float) -> ActorConfig:
    own = {name: keys.pop(name) for name in list(keys) if name in PolicyLossConfig.__dataclass_fields__}
    loss = PolicyLossConfig(loss_mode, **{"dro_beta": 0.5, "clip_cov_ratio": 1.0, "kl_cov_ratio": 0.3, **own})
    return ActorConfig(**{"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 2.0, **keys}, policy_loss=loss)


def one_token(loss_mode: str, advantage: float, ratio: float, p: float = 0.5, **keys: float) -> tuple:
    """(loss, gradient, clipped, clipped_lower) of one token that has probability p now and p / ratio before."""
    new = torch.tensor([math.log(p)], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([math.log(p / ratio)], dtype=torch.float64)
    config = actor(loss_mode, **keys)
    tokens = PolicyTokens(new, old, torch.tensor([advantage], dtype=torch.float64), torch.tensor([1]))
    terms = load_policy_loss(config)(tokens, config)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), new)
    return terms.loss.item(), gradient.item(), terms.clipped.item(), terms.clipped_lower.item()


LOG2 = math.log(2)
SIGMOID = 1 / (1 + math.exp(-0.5))

#  p is 1/2, so log p is -log 2; ranges 0.2 and 0.3, c = 2
BY_HAND = [
    pytest.param("gpg", 3.0, 1.5, {}, (3 * LOG2, -3.0, 0, 0), id="gpg: no ratio"),
    pytest.param("cispo", 3.0, 1.25, {}, (1.25 * 3 * LOG2, -3.75, 0, 0), id="cispo inside"),
    pytest.param("cispo", 3.0, 2.0, {}, (1.3 * 3 * LOG2, -3.9, 1, 0), id="cispo above: clipped, and learns"),
    pytest.param("cispo", -3.0, 0.5, {}, (-0.8 * 3 * LOG2, 2.4, 1, 0), id="cispo below"),
    # 4 / tau sigmoid(tau (r - 1)); its slope is 4 s (1 - s), times r for the log-prob
    pytest.param("sapo", 3.0, 1.0, {}, (-6.0, -3.0, 0, 0), id="sapo at one: 2 / tau, and the plain gradient"),
    pytest.param(
        "sapo", 3.0, 1.5, {}, (-12 * SIGMOID, -18 * SIGMOID * (1 - SIGMOID), 0, 0), id="sapo above: less gradient"
    ),
    pytest.param(
        "sapo", -3.0, 1.25, {"tau_neg": 2.0}, (6 * SIGMOID, 15 * SIGMOID * (1 - SIGMOID), 0, 0), id="sapo's tau_neg"
    ),
    # p_old = 0.4 and p = 0.5 are 0.1 apart
    pytest.param("dppo_tv", 3.0, 1.25, {}, (3.75 * LOG2, -3.75, 0, 0), id="tv: within 0.3"),
    pytest.param("dppo_tv", 3.0, 1.25, {"clip_ratio_high": 0.09}, (0, 0, 1, 0), id="tv: beyond 0.09, and up"),
    pytest.param("dppo_tv", -3.0, 1.25, {"clip_ratio_low": 0.09}, (-3.75 * LOG2, 3.75, 0, 0), id="tv: up, wanted down"),
    pytest.param("dppo_tv", -3.0, 0.625, {"clip_ratio_low": 0.29}, (0, 0, 1, 0), id="tv: down from 0.8, wanted down"),
    pytest.param("dppo_tv", -3.0, 2.5, {}, (-6 * LOG2, 6.0, 0, 1), id="tv: the ratio counts at most c"),
    # KL of (0.4, 0.6) and (0.5, 0.5): 0.4 log 0.8 + 0.6 log 1.2 = 0.0201355
    pytest.param("dppo_kl", 3.0, 1.25, {"clip_ratio_high": 0.021}, (3.75 * LOG2, -3.75, 0, 0), id="kl: within"),
    pytest.param("dppo_kl", 3.0, 1.25, {"clip_ratio_high": 0.020}, (0, 0, 1, 0), id="kl: beyond, and up"),
    pytest.param("dppo_kl", -3.0, 1.25, {"clip_ratio_low": 0.02}, (-3.75 * LOG2, 3.75, 0, 0), id="kl: up, wanted down"),
    pytest.param("dro", 3.0, 2.0, {}, (3 * LOG2 + LOG2**2 / 4, -3 + LOG2 / 2, 0, 0), id="dro: pulled back"),
    pytest.param("dro", 3.0, 0.5, {}, (3 * LOG2 + LOG2**2 / 4, -3 - LOG2 / 2, 0, 0), id="dro: pulled on"),
    # The log-ratio is limited to [-0.2, 0.3], not the ratio
    pytest.param("geo_mean", 3.0, 1.25, {}, (-3.75, -3.75, 0, 0), id="gmpo inside"),
    pytest.param("geo_mean", 3.0, 1.5, {}, (-3 * math.exp(0.3), 0, 1, 0), id="gmpo above e^0.3"),
    pytest.param("geo_mean", -3.0, 1.5, {}, (4.5, 4.5, 0, 1), id="gmpo above, wanted down"),
    pytest.param("geo_mean", -3.0, 0.5, {}, (3 * math.exp(-0.2), 0, 0, 1), id="gmpo below e^-0.2"),
    # w^k e^(lambda (1 - w)): k = 2, lambda = 3 above, k = 3, lambda = 2 below
    pytest.param("vespo", 3.0, 1.0, {}, (3 * LOG2, -3.0, 0, 0), id="vespo at one: the plain gradient"),
    pytest.param("vespo", 3.0, 2.0, {}, (12 * math.exp(-3) * LOG2, -12 * math.exp(-3), 0, 0), id="vespo above"),
    pytest.param("vespo", -3.0, 0.5, {}, (-0.375 * math.e * LOG2, 0.375 * math.e, 0, 0), id="vespo below"),
    pytest.param("vespo", -3.0, 0.5, {"vespo_k_neg": 0.0, "vespo_lambda_neg": 0.0}, (-3 * LOG2, 3.0, 0, 0), id="phi 1"),
    pytest.param("luspo", 3.0, 1.5, {}, (-3.9, 0, 1, 0), id="luspo: GSPO's clip of 1.3"),
    pytest.param("kl_cov", 3.0, 2.0, {}, (-6 + 0.1 * LOG2, -6 + 0.1, 1, 0), id="kl_cov: at least one is penalised"),
    pytest.param("clip_cov", 3.0, 1.25, {}, (-3.75, -3.75, 0, 0), id="clip_cov: a lone token has no covariance"),
    pytest.param("clip_cov", 3.0, 1.5, {}, (-3.9, 0, 0, 0), id="clip_cov: PPO's clip of 1.3"),
]


@pytest.mark.parametrize(("loss_mode", "advantage", "ratio", "keys", "expected"), BY_HAND)
def test_by_hand(loss_mode, advantage, ratio, keys, expected):
    """Value, gradient and both marks of one token. Would not catch a mean over an answer."""
    assert one_token(loss_mode, advantage, ratio, **keys) == pytest.approx(expected, abs=1e-9)


# log r is -24, or 24 or 30, and p = e^-25 or e^-1; no term but the exponential has a limit of 20
@pytest.mark.parametrize(
    ("mode", "advantage", "new", "old", "loss", "gradient"),
    [
        pytest.param("dro", 1.0, -25.0, -1.0, 25 + 0.5 * 24**2, -25.0, id="-A log p + (log r)^2 / 2: -1 - 24"),
        pytest.param("dro", 1.0, -1.0, -31.0, 1 + 0.5 * 30**2, 29.0, id="and back: -1 + 30"),
        pytest.param("kl_cov", 0.0, -25.0, -1.0, 24.0, -1.0, id="the penalty |log r| alone"),
        pytest.param("kl_cov", 0.0, -1.0, -25.0, 24.0, 1.0, id="the same from above"),
        # The exponential of a mean below the clip has one; e^24 would have its gradient, too
        pytest.param("geo_mean", -1.0, -1.0, -25.0, math.exp(20), 0.0, id="e^24 is limited"),
    ],
)
def test_log_ratios_beyond_twenty(mode, advantage, new, old, loss, gradient):
    """Terms without an exponential keep value and gradient. Would not catch a limit on another scale."""
    terms = one_token(mode, advantage, math.exp(new - old), p=math.exp(new), dro_beta=1.0, ppo_kl_coef=1.0)
    assert terms[:2] == pytest.approx((loss, gradient), rel=1e-9)


def test_geo_mean_limits_the_mean():
    """log r of -30 and 0, A = 1: -e^-15, where a limit on each would give -e^-10. Would not catch an overflow."""
    new, old = torch.tensor([-31.0, -1.0]).double(), torch.full((2,), -1.0).double()
    tokens = PolicyTokens(new, old, torch.ones(2).double(), torch.tensor([2]))
    terms = load_policy_loss(actor("geo_mean"))(tokens, actor("geo_mean"))
    assert terms.loss.tolist() == pytest.approx([-math.exp(-15)] * 2)


def test_the_kl_of_tokens_is_not_limited():
    """`actor/ppo_kl` of a token with log r = -30 is 30. Would not catch a mean over ranks."""
    tokens = PolicyTokens(torch.tensor([-31.0]), torch.tensor([-1.0]), torch.ones(1), torch.tensor([1]))
    for mode in POLICY_LOSSES:
        assert load_policy_loss(actor(mode))(tokens, actor(mode)).kl.tolist() == [30.0], mode


def test_sapo_is_averaged_over_answers():
    """r = 1 and tau = 1, so that a token's loss is -2 A. Answers of one token with A = 1 and of three with A = 3: -(2 +
    6) / 2 = -4, where a mean over tokens has -(2 + 3 * 6) / 4 = -5. Would not catch KL or entropy under another mode.
    """
    lengths, advantages = torch.tensor([1, 3]), torch.tensor([1.0, 3.0, 3.0, 3.0])
    zeros = torch.zeros(4)
    for mode in LOSS_AGG_MODES:
        config = actor("sapo", loss_agg_mode=mode)
        terms = load_policy_loss(config)(PolicyTokens(zeros, zeros, advantages, lengths), config)
        weights = token_weights(torch.ones(4), lengths, BatchTotals(4, 2), policy_agg_mode(config), 8)
        assert float((terms.loss * weights).sum()) == pytest.approx(-4.0)
    assert policy_agg_mode(actor("gspo", loss_agg_mode="token-sum")) == "token-sum"


def test_luspo_sums_over_the_tokens_of_an_answer():
    """r = 1, so that a token's loss is -A. Answers of one token with A = 1 and of three with A = 3: -(1 + 9) / 2.

    Would not catch a length that counts tokens which are left out.
    """
    lengths, advantages, zeros = torch.tensor([1, 3]), torch.tensor([1.0, 3.0, 3.0, 3.0]), torch.zeros(4)
    config = actor("luspo", loss_agg_mode="token-mean")
    terms = load_policy_loss(config)(PolicyTokens(zeros, zeros, advantages, lengths), config)
    weights = token_weights(torch.ones(4), lengths, BatchTotals(4, 2), policy_agg_mode(config), 8)
    assert float((terms.loss * weights).sum()) == -5.0


def test_vespo_weighs_an_answer_by_the_product_of_its_ratios():
    """Ratios 2 and 1 of an answer, and one of 9 that is left out: w = 2 on all tokens. Would not catch a gradient."""
    new, kept = torch.tensor([2.0, 1.0, 9.0]).log().double(), torch.tensor([1.0, 1.0, 0.0]).double()
    zeros, advantages = torch.zeros(3).double(), torch.tensor([1.0, 1.0, -1.0]).double()
    tokens = PolicyTokens(new, zeros, advantages, torch.tensor([3]), kept)
    terms = load_policy_loss(actor("vespo"))(tokens, actor("vespo"))
    weights = [4 * math.exp(-3)] * 2 + [8 * math.exp(-2)]
    assert terms.metrics["actor/vespo_weight"].tolist() == pytest.approx(weights)
    expected = [-w * a * x for w, a, x in zip(weights, advantages.tolist(), new.tolist(), strict=True)]
    assert terms.loss.tolist() == pytest.approx(expected)


# An answer with A < 0 is masked where the mean of log(p_old / p) over what counts is above the threshold of 0.5
@pytest.mark.parametrize(
    ("advantage", "distances", "kept", "mask"),
    [
        pytest.param(-1.0, [1.0, 0.1], [1, 1], 0.0, id="0.55 away"),
        pytest.param(-1.0, [0.9, 0.1], [1, 1], 1.0, id="0.5 away: at the threshold"),
        pytest.param(1.0, [9.0, 9.0], [1, 1], 1.0, id="wanted: never"),
        pytest.param(0.0, [9.0, 9.0], [1, 1], 1.0, id="no advantage"),
        pytest.param(-1.0, [0.1, 9.0], [1, 0], 1.0, id="what is left out is no distance"),
        pytest.param(-1.0, [-9.0, -9.0], [1, 1], 1.0, id="likelier than before"),
    ],
)
def test_sequence_mask_by_hand(advantage, distances, kept, mask):
    """Beside another answer that is always masked. Would not catch a mask that carries a gradient; it is of bools."""
    old = torch.tensor([*distances, 2.0]).double()
    advantages = torch.tensor([advantage, advantage, -1.0]).double()
    tokens = PolicyTokens(
        torch.zeros(3).double(), old, advantages, torch.tensor([2, 0, 1]), torch.tensor([*kept, 1]).double()
    )
    assert sequence_mask(tokens, 0.5).tolist() == [mask, mask, 0.0]


def test_geo_mean_of_three_tokens():
    """One left out, weights 1 and 4: e^mean(0.1, 0.3) * -2 * sqrt(1 * 4). Would not catch an unlike advantage."""
    new = torch.tensor([0.1, 9.0, 0.5], dtype=torch.float64, requires_grad=True)
    weights, kept = torch.tensor([1.0, 7.0, 4.0]).double(), torch.tensor([1.0, 0.0, 1.0]).double()
    advantages, lengths = torch.full((3,), 2.0).double(), torch.tensor([3, 0])
    tokens = PolicyTokens(new, torch.zeros(3).double(), advantages, lengths, kept, weights)
    terms = load_policy_loss(actor("geo_mean"))(tokens, actor("geo_mean"))
    assert terms.is_weighted and terms.loss.tolist() == pytest.approx([-4 * math.exp(0.2)] * 3)
    (gradient,) = torch.autograd.grad(terms.loss[0], new)
    assert gradient.tolist() == pytest.approx([-2 * math.exp(0.2), 0.0, 0.0])


COV = {"log_probs": [-1.0, -3.0, -2.0, -2.0, 5.0], "advantages": [2.0, -2.0, 1.0, -1.0, 50.0], "kept": [1, 1, 1, 1, 0]}


def cov_tokens() -> PolicyTokens:
    """Means over the four that count are -2 and 0; covariances 2, 2, 0, 0, and none."""
    columns = {name: torch.tensor(values).double() for name, values in COV.items()}
    old = columns["log_probs"] - torch.tensor([0.1, 0.1, 0.5, -0.1, 0.0])
    return PolicyTokens(old_log_probs=old, lengths=torch.tensor([3, 0, 2]), **columns)


def test_covariances_by_hand():
    """Would not catch a mean over tokens that do not count, but where they are extreme, as here."""
    assert covariances(cov_tokens()).tolist() == [2.0, 2.0, 0.0, 0.0, -math.inf]


@pytest.mark.parametrize(
    ("keys", "drawn"),
    [
        ({}, [1, 1, 0, 0, 0]),
        ({"clip_cov_lb": -1.0}, [1, 1, 0, 1, 0]),
        ({"clip_cov_ub": 2.0}, [0, 0, 0, 0, 0]),
    ],
)
def test_clip_cov_draws_from_the_band(keys, drawn):
    """All that are inside, where the share is large; the third, which PPO clips, never. Would not catch the share."""
    config = actor("clip_cov", **keys)
    terms = load_policy_loss(config)(cov_tokens(), config)
    assert terms.clipped.tolist() == drawn
    plain = load_policy_loss(actor("vanilla"))(cov_tokens(), actor("vanilla", clip_ratio_c=1e9))
    assert terms.loss.tolist() == pytest.approx([x * (1 - d) for x, d in zip(plain.loss.tolist(), drawn, strict=True)])


@pytest.mark.parametrize(("share", "number"), [(0.0001, 1), (0.2, 20), (0.205, 20), (0.9, 50)])
def test_clip_cov_draws_as_many(share, number):
    """Of 100 tokens 50 are candidates; the same every time, not the first ones. Would not catch a bias in the draw."""
    advantages = torch.tensor([1.0, -1.0]).repeat(50).double()
    log_probs = torch.cat([torch.full((50,), -1.0), torch.full((50,), -3.0)]).double() + 0.2 * advantages
    tokens = PolicyTokens(log_probs, log_probs, advantages, torch.tensor([100]))
    config = actor("clip_cov", clip_cov_ratio=share, clip_cov_lb=0.0, clip_cov_ub=9.0)
    loss = load_policy_loss(config)
    drawn = loss(tokens, config).clipped
    assert drawn.sum() == number and torch.equal(drawn, loss(tokens, config).clipped)
    candidates = (covariances(tokens) > 0).nonzero()[:, 0]
    assert number == 50 or drawn[candidates[:number]].sum() < number or number == 1


def test_kl_cov_penalises_the_largest():
    """Shares of 4: one, and two of covariance 2; the first of equal ones. Would not catch another rounding."""
    for share, marks in ((0.3, [1, 0, 0, 0, 0]), (0.5, [1, 1, 0, 0, 0]), (1.0, [1, 1, 1, 1, 0])):
        config = actor("kl_cov", kl_cov_ratio=share)
        terms = load_policy_loss(config)(cov_tokens(), config)
        assert terms.clipped.tolist() == marks
        assert terms.kl.tolist() == pytest.approx([0.1, 0.1, 0.5, 0.1, 0.0])
        expected = [-2 * math.exp(0.1), 2 * math.exp(0.1), -math.exp(0.5), math.exp(-0.1)]
        penalties = [0.1 * mark * size for mark, size in zip(marks, (0.1, 0.1, 0.5, 0.1), strict=False)]
        assert terms.loss.tolist()[:4] == pytest.approx([x + y for x, y in zip(expected, penalties, strict=True)])


def test_bypass_mode_is_vanilla_or_reinforce():
    """Would not catch a worker that does not look."""
    for loss_type, expected in (("ppo_clip", "vanilla"), ("reinforce", "gpg")):
        correction = RolloutCorrectionConfig(bypass_mode=True, loss_type=loss_type)
        for loss_mode in ("vanilla", "bypass_mode"):
            assert load_policy_loss(actor(loss_mode), correction) is POLICY_LOSSES[expected].function
    assert load_policy_loss(actor("sapo"), RolloutCorrectionConfig(bypass_mode=True)).__name__ == "sapo_loss"


# Against Python floats


BAND = (0.1, 2.0)


@dataclass(frozen=True)
class Token:
    new: float
    old: float
    advantage: float
    kept: bool


def reference(mode: str, rows: list[list[Token]], new: list[list[float]], c: ActorConfig) -> list[list[float]]:
    """One loss per token; what has no gradient is read from the tokens, what has one from `new`."""
    counting = [token for row in rows for token in row if token.kept]
    mean_a = statistics.fmean(token.advantage for token in counting) if counting else 0.0
    mean_p = statistics.fmean(token.new for token in counting) if counting else 0.0

    def covariance(token: Token) -> float:
        return (token.advantage - mean_a) * (token.new - mean_p)

    ranked = sorted(counting, key=covariance, reverse=True)
    penalised = ranked[: max(int(c.policy_loss.kl_cov_ratio * len(counting)), 1)]

    def one(token: Token, x: float, row: list[Token], xs: list[float]) -> float:
        a, ratio, now = token.advantage, math.exp(token.new - token.old), math.exp(x - token.old)
        p, q = math.exp(token.new), math.exp(token.old)
        low, high = 1 - c.clip_ratio_low, 1 + c.clip_ratio_high
        if mode == "gpg":
            return -a * x
        if mode == "cispo":
            return -a * x * min(max(ratio, low), high)
        if mode == "sapo":
            tau = c.tau_pos if a > 0 else c.tau_neg
            return -a * 4 / tau / (1 + math.exp(-tau * (now - 1)))
        if mode == "dro":
            return -a * x + c.policy_loss.dro_beta / 2 * (x - token.old) ** 2
        if mode == "dppo_tv":
            ok = p - q <= c.clip_ratio_high if a > 0 else q - p <= c.clip_ratio_low
            return -a * x * min(ratio, c.clip_ratio_c) * ok
        if mode == "dppo_kl":
            kl = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
            ok = kl <= c.clip_ratio_high or p <= q if a > 0 else kl <= c.clip_ratio_low or p >= q
            return -a * x * min(ratio, c.clip_ratio_c) * ok
        if mode == "clip_cov":
            gain = min(now * a, min(max(now, low), high) * a)
            drawn = c.policy_loss.clip_cov_lb < covariance(token) < c.policy_loss.clip_cov_ub
            is_clipped = min(max(ratio, low), high) * a < ratio * a
            return 0.0 if token.kept and drawn and not is_clipped else -gain
        if mode == "kl_cov":
            return -a * now + c.policy_loss.ppo_kl_coef * abs(x - token.old) * (token in penalised)
        kept = [(t, y) for t, y in zip(row, xs, strict=True) if t.kept]
        if mode == "vespo":
            w = math.exp(sum(t.new - t.old for t, _ in kept))
            k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
            return -a * x * w**k * math.exp(rate * (1 - w))
        if not kept:
            return 0.0
        mean_advantage = statistics.fmean(t.advantage for t, _ in kept)
        if mode in ("gspo", "gspo_token", "luspo"):
            s = math.exp(statistics.fmean(t.new - t.old for t, _ in kept)) * math.exp(x - token.new)
            return -min(s * a, min(max(s, low), high) * a)
        logs = []
        for t, y in kept:
            log_ratio = y - t.old
            limited = min(max(log_ratio, -c.clip_ratio_low), c.clip_ratio_high)
            logs.append(min(log_ratio, limited) if t.advantage > 0 else max(log_ratio, limited) if t.advantage else 0.0)
        return -mean_advantage * math.exp(statistics.fmean(logs))

    return [
        [one(token, x, row, xs) for token, x in zip(row, xs, strict=True)] for row, xs in zip(rows, new, strict=True)
    ]


def is_borderline(rows: list[list[Token]]) -> bool:
    """Whether two tokens have the same covariance, or one has that of a bound."""
    counting = [token for row in rows for token in row if token.kept]
    if not counting:
        return False
    mean_a, mean_p = (statistics.fmean(getattr(token, name) for token in counting) for name in ("advantage", "new"))
    found = sorted((token.advantage - mean_a) * (token.new - mean_p) for token in counting)
    return any(abs(x - y) < 1e-9 for x, y in itertools.pairwise(found)) or any(
        abs(x - bound) < 1e-9 for x in found for bound in BAND
    )


def aggregated(losses: list[list[float]], rows: list[list[Token]]) -> float:
    """seq-mean-token-mean over what counts."""
    answers = [
        [x for x, token in zip(row, tokens, strict=True) if token.kept]
        for row, tokens in zip(losses, rows, strict=True)
    ]
    answers = [row for row in answers if row]
    return statistics.fmean(statistics.fmean(row) for row in answers) if answers else 0.0


def terms_of(mode: str, rows: list[list[Token]], config: ActorConfig) -> tuple[PolicyTerms, torch.Tensor, torch.Tensor]:
    """(terms, log-probs with a gradient, weights of tokens)."""
    flat = [token for row in rows for token in row]
    columns = torch.tensor([[t.new, t.old, t.advantage, float(t.kept)] for t in flat], dtype=torch.float64).reshape(
        -1, 4
    )
    new, old, advantages, kept = (column.clone() for column in columns.T)
    lengths = torch.tensor([len(row) for row in rows])
    totals = BatchTotals(int(kept.sum()), sum(any(t.kept for t in row) for row in rows))
    tokens = PolicyTokens(new.requires_grad_(), old, advantages, lengths, kept)
    terms = load_policy_loss(config)(tokens, config)
    return terms, new, token_weights(kept, lengths, totals, "seq-mean-token-mean", 1)


numbers = st.floats(-3, -0.05)
tokens = st.builds(Token, numbers, numbers, st.sampled_from([-1.5, -0.3, 0.4, 1.0, 2.5]), st.booleans())
answers = st.lists(st.lists(tokens, max_size=5), min_size=1, max_size=4)


@pytest.mark.parametrize("mode", sorted({*POLICY_LOSSES} - {"vanilla", "bypass_mode"}))
@settings(max_examples=15, deadline=None)
@given(rows=answers)
def test_value_and_gradient_agree_with_python(mode, rows):
    """Aggregated loss and its gradient by central differences, in float64, on answers that may be empty or left out.

    Would not catch a share of drawn tokens below all of them; a test above does.
    """
    check_value_and_gradient(mode, rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", sorted({*POLICY_LOSSES} - {"vanilla", "bypass_mode"}))
@settings(max_examples=200, deadline=None)
@given(rows=answers)
def test_value_and_gradient_agree_on_many_more_answers(mode, rows):
    """The same, for longer."""
    check_value_and_gradient(mode, rows)


def check_value_and_gradient(mode: str, rows: list[list[Token]]) -> None:
    config = actor(mode, clip_cov_lb=BAND[0], clip_cov_ub=BAND[1])
    new = [[token.new for token in row] for row in rows]
    if mode.endswith("cov") and is_borderline(rows):
        return  # rounding decides which are chosen
    terms, log_probs, weights = terms_of(mode, rows, config)
    loss = (terms.loss * weights).sum()
    assert loss.item() == pytest.approx(aggregated(reference(mode, rows, new, config), rows), rel=1e-9, abs=1e-9)
    assert not (terms.clipped.requires_grad or terms.clipped_lower.requires_grad or terms.kl.requires_grad)
    if not log_probs.numel():
        return
    found = torch.autograd.grad(loss, log_probs)[0].split([len(row) for row in rows])
    step = 1e-6
    for r, row in enumerate(rows):
        for t in range(len(row)):
            moved = []
            for sign in (1, -1):
                there = [list(xs) for xs in new]
                there[r][t] += sign * step
                moved.append(aggregated(reference(mode, rows, there, config), rows))
            slope, bend = (moved[0] - moved[1]) / (2 * step), moved[0] + moved[1] - 2 * loss.item()
            if abs(bend) > 1e-8:
                continue  # at a kink
            assert found[r][t].item() == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("mode", sorted({*POLICY_LOSSES} - {"clip_cov", "kl_cov"}))
@settings(max_examples=30, deadline=None)
@given(rows=answers, pieces=st.integers(1, 4))
def test_answers_do_not_know_each_other(mode, rows, pieces):
    """The losses of tokens are the same however answers are cut into micro-batches. Would not catch a wrong total."""
    config = actor(mode)
    whole = terms_of(mode, rows, config)[0].loss.split([len(row) for row in rows])
    for start in range(pieces):
        piece = rows[start::pieces]
        if piece:
            found = terms_of(mode, piece, config)[0].loss
            assert found.tolist() == pytest.approx([x for row in whole[start::pieces] for x in row.tolist()])


@pytest.mark.parametrize("mode", [*POLICY_LOSSES])
def test_extremes_stay_finite(mode):
    """Log-probs of 0 and -200 either way, all three signs; and no token at all. Would not catch a wrong limit."""
    log_probs = torch.tensor([0.0, -200.0, 0.0] * 3, requires_grad=True)
    old = torch.tensor([-200.0, 0.0, 0.0] * 3)
    advantages = torch.tensor([1.0, 0.0, -1.0]).repeat_interleave(3)
    config = actor(mode)
    for lengths, rows in ((torch.tensor([3, 3, 0, 3]), slice(None)), (torch.tensor([0, 0]), slice(0))):
        tokens = PolicyTokens(log_probs[rows], old[rows], advantages[rows], lengths)
        terms = load_policy_loss(config)(tokens, config)
        (gradient,) = torch.autograd.grad(terms.loss.sum(), log_probs, retain_graph=True)
        assert terms.loss.shape == tokens.advantages.shape
        assert terms.loss.isfinite().all() and gradient.isfinite().all()
