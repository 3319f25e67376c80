"""PPO's policy objective, per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class PolicyTerms:
    """Per-token terms, all float32 [N].

    loss: clipped surrogate, to be minimised. clipped: 1 where the clip decided. kl: old minus new log-prob (k1).
    """

    loss: Tensor
    clipped: Tensor
    kl: Tensor


def ppo_clip(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_ratio: float) -> PolicyTerms:
    """Clipped surrogate (Schulman et al., arXiv:1707.06347, eq. 7): -min(r A, clip(r, 1-e, 1+e) A), r = p / p_old.

    All arguments [N]; gradients flow through `log_probs` only. The log-ratio is limited to +-LOG_RATIO_LIMIT before the
    exponential, which would overflow to inf (and inf * 0 to NaN) at 89.
    """
    ratio = (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain = -advantages * ratio
    limited = -advantages * ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    return PolicyTerms(
        loss=torch.maximum(plain, limited),
        clipped=(limited > plain).float(),
        kl=(old_log_probs - log_probs).detach(),
    )
