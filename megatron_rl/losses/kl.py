"""KL penalties against the reference policy, and their coefficients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.config.declarations import KL_ESTIMATES
from megatron_rl.losses.policy import LOG_RATIO_LIMIT, limited_exp

if TYPE_CHECKING:
    from torch import Tensor

K3_LIMIT = 10.0


KlEstimator = Callable[["Tensor", "Tensor"], "Tensor"]
"""(log_probs, ref_log_probs) -> estimate per token."""


def straight_through(estimate: KlEstimator) -> KlEstimator:
    """Return the estimate with the gradient of k2: sg[estimate] + k2 - sg[k2].

    Of the three only k2's gradient is an unbiased estimate of the KL's, (log p - log p_ref) grad log p (Tang and Munos,
    "On a few pitfalls in KL divergence gradient estimation for RL", arXiv:2506.09477).
    """

    def estimated(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        carrier = kl_k2(log_probs, ref_log_probs)
        return estimate(log_probs, ref_log_probs).detach() + (carrier - carrier.detach())

    return estimated


def kl_estimate(*names: str) -> Callable[[KlEstimator], KlEstimator]:
    """Declare an estimator of the KL, and under the names with a + the one with the gradient of k2."""

    def declare(estimate: KlEstimator) -> KlEstimator:
        KL_ESTIMATES.add(tuple(f"{name}+" for name in names), None, ())(straight_through(estimate))
        return KL_ESTIMATES.add(names, None, ())(estimate)

    return declare


@kl_estimate("kl", "k1")
def kl_k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The k1 estimator log p - log p_ref per sampled token (Schulman, "Approximating KL divergence"); any shape.

    Unbiased as a value; as a loss its gradient is that of the log-prob, 0 on average.
    """
    return log_probs - ref_log_probs


@kl_estimate("abs")
def kl_abs(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|log p - log p_ref| per sampled token; any shape. No estimate of the KL, but a distance, never negative."""
    return (log_probs - ref_log_probs).abs()


@kl_estimate("mse", "k2")
def kl_k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The k2 estimator (log p - log p_ref)^2 / 2 per sampled token (Schulman, as above); any shape.

    Slightly biased as a value; its gradient is an unbiased estimate of the KL's.
    """
    return 0.5 * (log_probs - ref_log_probs).square()


@kl_estimate("low_var_kl", "k3")
def kl_k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The k3 estimator r - 1 - log r with r = p_ref / p, per sampled token (Schulman, as above); any shape.

    Unbiased, never negative, of low variance. As in verl log r is limited to +-LOG_RATIO_LIMIT and the result to
    K3_LIMIT, so that one token cannot outweigh a batch.
    """
    log_ratio = (ref_log_probs - log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (log_ratio.expm1() - log_ratio).clamp(max=K3_LIMIT)


def importance_weighted(estimates: Tensor, log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """(p / p_old) * estimate of each token, whose mean over samples of p_old estimates the KL under p; any shape.

    The gradient flows through the ratio too, which makes that of k1 and k3 an unbiased estimate of the KL's
    (DeepSeek-AI, DeepSeek-V3.2, arXiv:2512.02556).
    """
    return limited_exp(log_probs - old_log_probs) * estimates


@dataclass
class FixedKL:
    """Constant coefficient."""

    coef: float

    def update(self, kl: float, num_samples: int) -> None:
        """No-op."""


@dataclass
class AdaptiveKL:
    """A weight that grows while the KL is above `target_kl` and shrinks while it is below.

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2: a proportional controller in
    log space, its error clipped to 0.2, that would change by a factor of e in about `horizon` / 0.2 samples.
    """

    coef: float
    target_kl: float
    horizon: int

    def update(self, kl: float, num_samples: int) -> None:
        """Adapt the weight to the mean KL of `num_samples` samples."""
        error = min(max(kl / self.target_kl - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_samples / self.horizon
