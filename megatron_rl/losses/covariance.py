"""Policy losses that hold back the few tokens which cost a policy most of its entropy (Cui et al., "The Entropy
Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv:2505.22617).

Entropy falls with the covariance of log-probs and advantages. Of a token it is (A - mean A) (log p - mean log p), with
means over the tokens of the micro-batch that count, as in verl: how a mini-batch is cut changes which tokens are
chosen, and every micro-batch with a candidate has at least one chosen. The choice depends on nothing but the
micro-batch, so that the ranks which share its vocabulary choose alike.

Legend: N sampled tokens of the micro-batch, packed end to end. Every loss is a `policy.PolicyLoss`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_rl.config.declarations import policy_loss
from megatron_rl.config.schema import ActorConfig
from megatron_rl.losses.policy import PolicyTerms, PolicyTokens, ppo_clip

if TYPE_CHECKING:
    from torch import Tensor

SHUFFLE_SEED = 2505_22617


def covariances(tokens: PolicyTokens) -> Tensor:
    """(A - mean A) (log p - mean log p) [N]; -inf where a token does not count."""
    counts = tokens.counts
    number = counts.sum().clamp(min=1)
    log_probs = tokens.log_probs.detach()
    spread_a = tokens.advantages - (tokens.advantages * counts).sum() / number
    spread_p = log_probs - (log_probs * counts).sum() / number
    return (spread_a * spread_p).where(counts > 0, float("-inf"))


def num_chosen(tokens: PolicyTokens, share: float) -> int:
    """How many tokens a share of those that count is: rounded down, and at least 1."""
    return max(int(share * float(tokens.counts.sum())), 1)


@policy_loss("clip_cov", keys=tuple(f"policy_loss.clip_cov_{key}" for key in ("ratio", "lb", "ub")))
def clip_cov_loss(tokens: PolicyTokens, config: ActorConfig) -> PolicyTerms:
    """PPO's; 0 on `clip_cov_ratio` of the tokens, chosen where the covariance is in (`clip_cov_lb`, `clip_cov_ub`).

    A fixed permutation chooses them, never a token that the clip decided. `clipped` marks those chosen. Cui et al.,
    arXiv:2505.22617.
    """
    import torch

    loss = config.policy_loss
    terms = ppo_clip(
        tokens.log_probs, tokens.old_log_probs, tokens.advantages, config.clip_ratio_low, config.clip_ratio_high
    )
    covariance = covariances(tokens)
    is_candidate = (covariance > loss.clip_cov_lb) & (covariance < loss.clip_cov_ub) & (terms.clipped == 0)
    (candidates,) = is_candidate.nonzero(as_tuple=True)
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(SHUFFLE_SEED))
    drawn = candidates[order[: num_chosen(tokens, loss.clip_cov_ratio)].to(candidates.device)]
    is_drawn = tokens.zeros.index_fill(0, drawn, 1.0)
    return replace(terms, loss=terms.loss * (1 - is_drawn), clipped=is_drawn)


@policy_loss("kl_cov", keys=("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"))
def kl_cov_loss(tokens: PolicyTokens, config: ActorConfig) -> PolicyTerms:
    """-A r without a clip, plus `ppo_kl_coef` |log r| on the `kl_cov_ratio` of tokens with the largest covariance.

    `clipped` marks those tokens, and `kl` is |log r|, as verl reports it. Cui et al., arXiv:2505.22617.
    """
    loss, distance = config.policy_loss, tokens.log_ratio.abs()
    covariance = covariances(tokens)
    number = min(num_chosen(tokens, loss.kl_cov_ratio), int((tokens.counts > 0).sum()))
    # Sorted, not topk: of equal ones the first, on every device.
    chosen = covariance.argsort(descending=True, stable=True)[:number]
    is_chosen = tokens.zeros.index_fill(0, chosen, 1.0)
    return PolicyTerms(
        loss=-tokens.advantages * tokens.ratio + loss.ppo_kl_coef * distance * is_chosen,
        clipped=is_chosen,
        clipped_lower=tokens.zeros,
        kl=distance.detach(),
    )
