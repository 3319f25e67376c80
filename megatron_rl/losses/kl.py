"""KL penalties against the reference policy."""

from __future__ import annotations

from torch import Tensor


def kl_k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The k1 estimator log p - log p_ref per sampled token (Schulman, "Approximating KL divergence"); any shape."""
    return log_probs - ref_log_probs
