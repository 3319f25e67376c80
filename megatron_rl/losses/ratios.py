"""Policy losses that bound or weigh the ratio r = p / p_old differently from PPO's clip does, or do without it.

Legend: N sampled tokens of b responses, packed end to end; A: advantage; sg[x]: x without its gradient. Every function
is a `policy.PolicyLoss`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.config.declarations import policy_loss
from megatron_rl.config.schema import ActorConfig
from megatron_rl.losses.policy import PolicyTerms, PolicyTokens, limited_exp
from megatron_rl.losses.rows import mean_counted, spread

if TYPE_CHECKING:
    from torch import Tensor

SMALL_PROBABILITY = 1e-8
CLIPS = ("clip_ratio_low", "clip_ratio_high")


@policy_loss("gpg", reads=("advantages",))
def gpg_loss(tokens: PolicyTokens, config: ActorConfig) -> PolicyTerms:
    """-A log p: the plain policy gradient, which has no old policy.

    GPG: Chu et al., arXiv:2504.02546. It is REINFORCE (Williams 1992), as `rollout_correction.loss_type` names it.
    """
    return PolicyTerms(-tokens.advantages * tokens.log_probs, tokens.zeros, tokens.zeros, tokens.k1)


@policy_loss("cispo", keys=CLIPS)
def cispo_loss(tokens: PolicyTokens, config: ActorConfig) -> PolicyTerms:
    """-sg[clip(r, 1 - low, 1 + high)] A log p: the weight of a token is clipped, its gradient never.

    CISPO: MiniMax, arXiv:2506.13585.
    """
    ratio = tokens.ratio.detach()
    limited = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    clipped = (ratio != limited).float()
    return PolicyTerms(-limited * tokens.advantages * tokens.log_probs, clipped, tokens.zeros, tokens.k1)


@policy_loss("sapo", aggregation="seq-mean-token-mean", keys=("tau_pos", "tau_neg"))
def sapo_loss(tokens: PolicyTokens, config: ActorConfig) -> PolicyTerms:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau `tau_pos` where A > 0, else `tau_neg`, averaged over responses.

    A smooth gate of slope 1 at r = 1 takes the place of a clip. SAPO: Gao et al., arXiv:2511.20347.
    """
    positive = tokens.advantages > 0
    tau = (tokens.zeros + config.tau_neg).masked_fill(positive, config.tau_pos)
    gate = (tau * (tokens.ratio - 1)).sigmoid() * 4 / tau
    return PolicyTerms(-tokens.advantages * gate, tokens.zeros, tokens.zeros, tokens.k1)


@policy_loss("dppo_tv", keys=(*CLIPS, "clip_ratio_c"))
def dppo_tv_loss(tokens: PolicyTokens, config: ActorConfig) -> PolicyTerms:
    """-sg[min(r, c)] A log p; 0 where p has moved by more than high (up, A > 0) or low (down).

    |p - p_old| is the total variation of the token against all others. DPPO-Binary-TV: arXiv:2602.04879.
    """
    moved = (tokens.log_probs.exp() - tokens.old_log_probs.exp()).detach()
    within = (moved <= config.clip_ratio_high).where(tokens.advantages > 0, moved >= -config.clip_ratio_low)
    return _truncated(tokens, within, config.clip_ratio_c)


@policy_loss("dppo_kl", keys=(*CLIPS, "clip_ratio_c"))
def dppo_kl_loss(tokens: PolicyTokens, config: ActorConfig) -> PolicyTerms:
    """-sg[min(r, c)] A log p; 0 where p has moved to where A points and the KL is more than high (A > 0) or low.

    The KL is that of the token against all others: p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)).
    DPPO-Binary-KL: arXiv:2602.04879.
    """
    log_p, log_old = tokens.log_probs.detach(), tokens.old_log_probs
    p, old = log_p.exp(), log_old.exp()
    others = ((1 - old + SMALL_PROBABILITY) / (1 - p + SMALL_PROBABILITY)).log()
    divergence = old * (log_old - log_p) + (1 - old) * others
    up = (divergence <= config.clip_ratio_high) | (p <= old)
    within = up.where(tokens.advantages > 0, (divergence <= config.clip_ratio_low) | (p >= old))
    return _truncated(tokens, within, config.clip_ratio_c)


def _truncated(tokens: PolicyTokens, within: Tensor, largest: float) -> PolicyTerms:
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(max=largest) * within
    return PolicyTerms(
        loss=-tokens.advantages * weight * tokens.log_probs,
        clipped=(~within).float(),
        clipped_lower=((ratio > largest) & within).float(),
        kl=tokens.k1,
    )


@policy_loss("dro", keys=("policy_loss.dro_beta",))
def dro_loss(tokens: PolicyTokens, config: ActorConfig) -> PolicyTerms:
    """-A log p + `dro_beta` / 2 (log r)^2: a quadratic penalty in place of a clip; `dro_beta` has to be set.

    DRO: Richemond et al., "Offline Regularised Reinforcement Learning for LLM Alignment", arXiv:2405.19107. Raises
    ValueError where beta is not set.
    """
    beta = config.policy_loss.dro_beta
    if beta is None:
        raise ValueError("policy_loss.loss_mode=dro needs policy_loss.dro_beta")
    penalty = 0.5 * beta * tokens.log_ratio.square()
    return PolicyTerms(-tokens.advantages * tokens.log_probs + penalty, tokens.zeros, tokens.zeros, tokens.k1)


@policy_loss(
    "geo_mean",
    aggregation="seq-mean-token-mean",
    reads=("old_log_probs", "advantages", "rollout_weights"),
    keys=CLIPS,
)
def geo_mean_loss(tokens: PolicyTokens, config: ActorConfig) -> PolicyTerms:
    """-mean(A) exp(mean of log r, each limited to [-low, high] as PPO's clip does), averaged over responses.

    Both means are over a response's tokens, which all have this term. A log r is limited where that makes A log r
    smaller. Rollout weights enter as their geometric mean over the response. GMPO: Zhao et al., arXiv:2507.20673.
    """
    sign, log_ratio, counts, lengths = tokens.advantages.sign(), tokens.log_ratio, tokens.counts, tokens.lengths
    limited = log_ratio.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    smaller = sign * (sign * log_ratio).minimum(sign * limited)
    terms = -mean_counted(tokens.advantages, counts, lengths) * limited_exp(mean_counted(smaller, counts, lengths))
    if tokens.rollout_weights is not None:
        logs = (tokens.rollout_weights + 1e-10).log()  # a weight may be 0
        terms = terms * mean_counted(logs, counts, lengths).exp()
    outside = (log_ratio != limited).detach()
    return PolicyTerms(
        loss=spread(terms, lengths, len(counts)),
        clipped=(outside & (tokens.advantages > 0)).float(),
        clipped_lower=(outside & (tokens.advantages < 0)).float(),
        kl=tokens.k1,
        is_weighted=True,
    )
