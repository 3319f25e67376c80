"""VESPO: the ratio of a whole response, without a mean over its tokens, under a smooth weight in place of a clip."""

from __future__ import annotations

from megatron_rl.config.declarations import policy_loss
from megatron_rl.config.schema import ActorConfig
from megatron_rl.losses.policy import PolicyTerms, PolicyTokens, limited_exp
from megatron_rl.losses.rows import spread, sum_rows

KEYS = tuple(f"policy_loss.vespo_{name}" for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"))


@policy_loss("vespo", keys=KEYS)
def vespo_loss(tokens: PolicyTokens, config: ActorConfig) -> PolicyTerms:
    """-sg[phi(w)] A log p, phi(w) = w^k e^(lambda (1 - w)), w the product of the r of the response's tokens that count.

    k and lambda are `vespo_k_pos` and `vespo_lambda_pos` where A >= 0, else `vespo_k_neg` and `vespo_lambda_neg`. phi
    is 1 at w = 1, largest at w = k / lambda, and near 0 for a response that became much more or much less likely.
    Shen et al., arXiv:2602.10693. With `bypass_mode` w is the ratio to the rollout, as in the paper.
    """
    loss = config.policy_loss
    log_w = spread(
        sum_rows(tokens.log_ratio.detach() * tokens.counts, tokens.lengths), tokens.lengths, len(tokens.counts)
    )
    is_positive = tokens.advantages >= 0
    k = (tokens.zeros + loss.vespo_k_neg).masked_fill(is_positive, loss.vespo_k_pos)
    rate = (tokens.zeros + loss.vespo_lambda_neg).masked_fill(is_positive, loss.vespo_lambda_pos)
    weight = (k * log_w + rate * (1 - limited_exp(log_w))).exp()
    return PolicyTerms(
        -weight * tokens.advantages * tokens.log_probs,
        tokens.zeros,
        tokens.zeros,
        tokens.k1,
        metrics={"actor/vespo_weight": weight},
    )
