"""Arguments and results of policy losses, and the clipped ones of PPO and GSPO; others have files of their own.

Legend: N sampled tokens of b responses, packed end to end. sg[x]: x without its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_rl.config.correction import RolloutCorrectionConfig
from megatron_rl.config.declarations import POLICY_LOSSES, policy_loss
from megatron_rl.config.schema import ActorConfig
from megatron_rl.config.user_functions import load_function
from megatron_rl.losses.rows import mean_counted, spread

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def limited_exp(exponent: Tensor) -> Tensor:
    """e^exponent, with the exponent limited to +-LOG_RATIO_LIMIT: in float32 e^89 is inf, and inf * 0 NaN.

    Beyond the limit it has no gradient, so that a term without an exponential takes the log-ratio as it is.
    """
    return exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@dataclass(frozen=True)
class PolicyTokens:
    """The tokens of a micro-batch: log-probs now and when they were sampled, and advantages, float32 [N].

    lengths: int64 [b], tokens of each response; may hold zeros. kept: 1 where a token counts in the loss, else 0; None:
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
    def zeros(self) -> Tensor:
        """0 for every token."""
        return self.advantages.new_zeros(self.advantages.shape)

    @property
    def counts(self) -> Tensor:
        """`kept`, of ones where it is None."""
        return self.advantages.new_ones(self.advantages.shape) if self.kept is None else self.kept


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


def load_policy_loss(config: ActorConfig, correction: RolloutCorrectionConfig | None = None) -> PolicyLoss:
    """The configured policy loss, built in or from the user's file. Raises ConfigError when the file does not have
    it."""
    if correction is not None and correction.bypass_mode and correction.loss_type == "reinforce":
        return POLICY_LOSSES["gpg"].function
    name, path = config.policy_loss.loss_mode, config.policy_loss.custom.path
    if name in POLICY_LOSSES or path is None:
        return POLICY_LOSSES[name].function
    return load_function(path, "actor_rollout_ref.actor.policy_loss.custom.path", name, ("tokens", "config"))


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
    bound = (-advantages * clip_c).where(advantages < 0, float("inf"))
    return PolicyTerms(
        loss=loss.minimum(bound),
        clipped=clipped,
        clipped_lower=(loss > bound).float(),
        kl=(old_log_probs - log_probs).detach(),
    )


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    plain = -advantages * ratio
    limited = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return plain.maximum(limited), (limited > plain).float()


@policy_loss("vanilla", "bypass_mode", keys=("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"))
def vanilla_loss(tokens: PolicyTokens, config: ActorConfig) -> PolicyTerms:
    """-min(r A, clip(r, 1 - low, 1 + high) A), at most -c A where A < 0.

    PPO: arXiv:1707.06347; clip-higher: arXiv:2503.14476; dual clip: arXiv:1912.09729; see `ppo_clip`. `bypass_mode`
    goes with `algorithm.rollout_correction.bypass_mode`, whose `loss_type` may replace it.
    """
    return ppo_clip(
        tokens.log_probs,
        tokens.old_log_probs,
        tokens.advantages,
        config.clip_ratio_low,
        config.clip_ratio_high,
        config.clip_ratio_c,
    )


@policy_loss("gspo", "gspo_token", keys=("clip_ratio_low", "clip_ratio_high"))
def gspo_loss(tokens: PolicyTokens, config: ActorConfig) -> PolicyTerms:
    """-min(s A, clip(s, 1 - low, 1 + high) A), s the geometric mean of the r of the response's tokens that count.

    GSPO: Zheng et al., arXiv:2507.18071, eq. 5 and 7, in the token form of eq. 14, GSPO-token: s_t = sg[s] p / sg[p]
    and the token's own A. Where all tokens of a response share an advantage, the two have one value and gradient.
    """
    log_probs = tokens.log_probs
    whole = spread(
        mean_counted(tokens.log_ratio.detach(), tokens.counts, tokens.lengths), tokens.lengths, len(tokens.counts)
    )
    ratio = limited_exp(whole + log_probs - log_probs.detach())
    loss, clipped = _clipped(ratio, tokens.advantages, config.clip_ratio_low, config.clip_ratio_high)
    return PolicyTerms(loss, clipped, tokens.zeros, tokens.k1)


def sequence_mask(tokens: PolicyTokens, threshold: float) -> Tensor:
    """[N]: 0 where A < 0 and the response's mean of log(p_old / p) is above `threshold`, else 1; without a gradient.

    A response that the policy has left already is not pushed away further. The mean is over tokens that count.
    DeepSeek-AI, arXiv:2512.02556, eq. 9. Their p_old is the rollout's: here it is with `bypass_mode`, else the
    trainer's, and `rollout_rs` looks at the difference between the two. What is masked stays in the denominators.
    """
    distance = spread(mean_counted(tokens.k1, tokens.counts, tokens.lengths), tokens.lengths, len(tokens.counts))
    return 1.0 - ((tokens.advantages < 0) & (distance > threshold)).to(tokens.advantages.dtype)
