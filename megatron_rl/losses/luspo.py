"""LUSPO: GSPO without its preference for short responses."""

from __future__ import annotations

from megatron_rl.config.declarations import policy_loss
from megatron_rl.config.schema import ActorConfig
from megatron_rl.losses.policy import PolicyTerms, PolicyTokens, gspo_loss


@policy_loss("luspo", aggregation="seq-mean-token-sum", keys=("clip_ratio_low", "clip_ratio_high"))
def luspo_loss(tokens: PolicyTokens, config: ActorConfig) -> PolicyTerms:
    """GSPO's, summed over a response's tokens: the response's loss times its number of tokens, averaged over responses.

    Liu et al., arXiv:2602.05261: in GSPO the gradient of a token is divided by the length of its response. The sum over
    tokens of `gspo_loss` has the value and the gradient of l * min(s A, clip(s) A), l the tokens that count.
    """
    return gspo_loss(tokens, config)
