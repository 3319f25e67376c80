"""Divergences between two distributions over a whole vocabulary, and their gradients, from rows of one rank.

Legend: n tokens, v rows of the vocabulary. log p: of the policy (the student), log q: of the teacher, float32 [n, v],
finite; a token whose log-prob is -1e30 has the probability 0. z: the policy's logits. Sums are over the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MixedKL:
    """(1 - w) KL(q || p) + w KL(p || q): the forward KL at w = 0, the reverse at w = 1."""

    reverse: float

    def sums(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """(this rank's part of the divergence [n], its part of KL(p || q) [n], 0 where w = 0 needs none)."""
        difference, nothing = log_p - log_q, log_p.new_zeros(len(log_p))
        reverse = (log_p.exp() * difference).sum(-1) if self.reverse > 0 else nothing
        forward = -(log_q.exp() * difference).sum(-1) if self.reverse < 1 else nothing
        return (1 - self.reverse) * forward + self.reverse * reverse, reverse

    def gradient(self, log_p: Tensor, log_q: Tensor, slope: Tensor) -> Tensor:
        """d / dz_j = (1 - w) (p_j - q_j) + w p_j (log p_j - log q_j - KL(p || q)). slope: KL(p || q) [n, 1]."""
        p = log_p.exp()
        if self.reverse == 0.0:
            return p.sub_(log_q.exp())
        of_reverse = (log_p - log_q).sub_(slope).mul_(p).mul_(self.reverse)
        return of_reverse if self.reverse == 1.0 else of_reverse.add_(p.sub_(log_q.exp()), alpha=1 - self.reverse)


@dataclass(frozen=True)
class GeneralisedJSD:
    """b KL(q || m) + (1 - b) KL(p || m) with m = b q + (1 - b) p, for 0 < b < 1."""

    beta: float

    def _log_mixture(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        import torch

        return torch.logaddexp(log_q + math.log(self.beta), log_p + math.log1p(-self.beta))

    def sums(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """(this rank's part of the divergence [n], its part of KL(p || m) [n])."""
        log_m = self._log_mixture(log_p, log_q)
        of_policy = (log_p.exp() * (log_p - log_m)).sum(-1)
        of_teacher = (log_q.exp() * (log_q - log_m)).sum(-1)
        return self.beta * of_teacher + (1 - self.beta) * of_policy, of_policy

    def gradient(self, log_p: Tensor, log_q: Tensor, slope: Tensor) -> Tensor:
        """d / dz_j = (1 - b) p_j (log p_j - log m_j - KL(p || m)). slope: KL(p || m) [n, 1]."""
        return (log_p - self._log_mixture(log_p, log_q)).sub_(slope).mul_(log_p.exp()).mul_(1 - self.beta)


VocabularyDivergence = MixedKL | GeneralisedJSD
