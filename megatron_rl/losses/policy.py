"""Policy objectives, per token: PPO's and GSPO's, and what every one reads and returns. Others are in `ratios.py` and
`covariance.py`; see `registry.py` for how to add one.

Legend: N response tokens of b answers, laid end to end. sg[x]: x without its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl.config.schema import ActorConfig
from megatron_rl.losses.row_sums import mean_counted, spread

LOG_RATIO_LIMIT = 20.0


def limited_exp(exponent: Tensor) -> Tensor:
    """e^exponent, with the exponent limited to +-LOG_RATIO_LIMIT: in float32 e^89 is inf, and inf * 0 NaN.

    Beyond the limit it has no gradient, so that a term without an exponential takes the log-ratio as it is.
    """
    return exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass(frozen=True)
class PolicyTokens:
    """What a policy loss reads: log-probs of the tokens now and when they were sampled, their advantages, float32 [N].

    lengths: int64 [b], tokens of each answer; may hold zeros. kept: 1 where a token counts in the loss, else 0; None:
    all do. rollout_weights: what the loss is multiplied with where the rollout's samples are weighed; None: nothing.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    lengths: Tensor
    kept: Tensor | None = None
    rollout_weights: Tensor | None = None

    @property
    def log_ratio(self) -> Tensor:
        """log(p / p_old), without a limit: for sums, squares and means. Its exponential is `ratio`."""
        return self.log_probs - self.old_log_probs

    @property
    def ratio(self) -> Tensor:
        """p / p_old, from e^-LOG_RATIO_LIMIT to e^LOG_RATIO_LIMIT."""
        return limited_exp(self.log_ratio)

    @property
    def k1(self) -> Tensor:
        """log(p_old / p) without its gradient and without a limit, as `actor/ppo_kl` averages it."""
        return (self.old_log_probs - self.log_probs).detach()

    @property
    def counts(self) -> Tensor:
        """`kept`, of ones where it is None."""
        return torch.ones_like(self.advantages) if self.kept is None else self.kept


@dataclass(frozen=True)
class PolicyTerms:
    """Per-token terms, all float32 [N].

    loss: to be minimised. clipped: 1 where the clip decided. clipped_lower: 1 where the dual clip did.
    kl: old minus new log-prob (k1). is_weighted: the loss has `rollout_weights` in it already.
    metrics: further numbers to report by name, each as its mean over the tokens that count; the same names every time.
    """

    loss: Tensor
    clipped: Tensor
    clipped_lower: Tensor
    kl: Tensor
    is_weighted: bool = False
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


PolicyLoss = Callable[[PolicyTokens, ActorConfig], PolicyTerms]
"""(tokens, the actor's keys) -> terms; gradients flow through `log_probs` only."""


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float = float("inf"),
) -> PolicyTerms:
    """Clipped surrogate: -min(r A, clip(r, 1 - low, 1 + high) A), r = p / p_old; where A < 0 at most -c A.

    Schulman et al., arXiv:1707.06347, eq. 7; low and high apart: DAPO (Yu et al., arXiv:2503.14476, eq. 8); dual clip
    with c > 1: Ye et al., arXiv:1912.09729. All arguments [N].
    """
    loss, clipped = _clipped(limited_exp(log_probs - old_log_probs), advantages, clip_low, clip_high)
    # 0 * inf is NaN, so the bound is only looked at where it applies.
    bound = torch.where(advantages < 0, -advantages * clip_c, torch.inf)
    return PolicyTerms(
        loss=torch.minimum(loss, bound),
        clipped=clipped,
        clipped_lower=(loss > bound).float(),
        kl=(old_log_probs - log_probs).detach(),
    )


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    clip_low: float,
    clip_high: float,
    kept: Tensor | None = None,
) -> PolicyTerms:
    """The clipped surrogate with the ratio of whole answers: s = exp(mean of the answer's log-ratios).

    Zheng et al., arXiv:2507.18071, eq. 5 and 7, in the token form of eq. 14, s_t = sg[s] p / sg[p], which has the same
    value and gradient where all tokens of an answer share an advantage. The mean is over tokens that are `kept`, as an
    answer's weight in the loss is. Arguments [N], `lengths` int64 [b].
    """
    counts = torch.ones_like(log_probs) if kept is None else kept
    whole = spread(mean_counted((log_probs - old_log_probs).detach(), counts, lengths), lengths)
    ratio = limited_exp(whole + log_probs - log_probs.detach())
    loss, clipped = _clipped(ratio, advantages, clip_low, clip_high)
    return PolicyTerms(loss, clipped, torch.zeros_like(clipped), (old_log_probs - log_probs).detach())


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    plain = -advantages * ratio
    limited = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(plain, limited), (limited > plain).float()


def vanilla_loss(tokens: PolicyTokens, config: ActorConfig) -> PolicyTerms:
    """`ppo_clip` with `clip_ratio_low`, `clip_ratio_high` and `clip_ratio_c`."""
    return ppo_clip(
        tokens.log_probs,
        tokens.old_log_probs,
        tokens.advantages,
        config.clip_ratio_low,
        config.clip_ratio_high,
        config.clip_ratio_c,
    )


def gspo_loss(tokens: PolicyTokens, config: ActorConfig) -> PolicyTerms:
    """`gspo` with `clip_ratio_low` and `clip_ratio_high`."""
    return gspo(
        tokens.log_probs,
        tokens.old_log_probs,
        tokens.advantages,
        tokens.lengths,
        config.clip_ratio_low,
        config.clip_ratio_high,
        tokens.kept,
    )
