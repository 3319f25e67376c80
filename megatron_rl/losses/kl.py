"""KL penalties against the reference policy, and what weighs them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


def kl_k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The k1 estimator log p - log p_ref per sampled token (Schulman, "Approximating KL divergence"); any shape."""
    return log_probs - ref_log_probs


@dataclass
class FixedKL:
    """A weight that stays."""

    coef: float

    def update(self, kl: float, num_samples: int) -> None:
        """Nothing follows from a measurement."""


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
        """Take notice of the mean KL of `num_samples` samples."""
        error = min(max(kl / self.target_kl - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_samples / self.horizon
