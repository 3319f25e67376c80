"""Losses of on-policy distillation: how far the policy is from a teacher at the tokens of its own responses.

What a loss reads says what a teacher makes, and what its function is:
- `teacher_log_probs`, those of the sampled tokens: (log p [N], log q [N]) -> [N], estimates of the reverse KL;
- the columns of a top-k: (log p [N, k], log q [N, k], its keys) -> [N];
- `teacher_hidden`: keys -> a divergence over the whole vocabulary, which `model.head_distillation` computes.

p: the policy (the student); q: the teacher; both at the temperature of the rollout. Divergences are computed from the v
rows of the vocabulary that a rank has: log p and log q float32 [n, v], finite (a token whose log-prob is -1e30 has the
probability 0); z: the policy's logits; sums are over the rows. Agarwal et al., "On-Policy Distillation of Language
Models", arXiv:2306.13649.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.config.declarations import distillation_loss
from megatron_rl.config.distillation_keys import DistillationLossConfig
from megatron_rl.losses.kl import kl_abs, kl_k1, kl_k2, kl_k3

if TYPE_CHECKING:
    from torch import Tensor

SAMPLED = ("teacher_log_probs",)
TEACHERS_TOP = ("teacher_top_ids", "teacher_top_log_probs")
STUDENTS_TOP = ("student_top_ids", "teacher_log_probs_at")
WHOLE = ("teacher_hidden",)


@distillation_loss("kl", "k1", reads=SAMPLED, keys=("loss_max_clamp",))
def sampled_k1(log_probs: Tensor, teacher: Tensor) -> Tensor:
    """log p - log q of the sampled token. Unbiased; as a part of the advantage only, because its gradient does not know
    the teacher.

    arXiv:2306.13649; as a reward: Lu and Thinking Machines Lab, "On-Policy Distillation", 2025.
    """
    return kl_k1(log_probs, teacher)


@distillation_loss("abs", reads=SAMPLED, keys=("loss_max_clamp",))
def sampled_abs(log_probs: Tensor, teacher: Tensor) -> Tensor:
    """|log p - log q| of the sampled token."""
    return kl_abs(log_probs, teacher)


@distillation_loss("mse", "k2", reads=SAMPLED, keys=("loss_max_clamp",))
def sampled_k2(log_probs: Tensor, teacher: Tensor) -> Tensor:
    """(log p - log q)^2 / 2 of the sampled token, whose gradient is an unbiased estimate of the reverse KL's.

    KDRL: Xu et al., arXiv:2506.02208, eq. 8.
    """
    return kl_k2(log_probs, teacher)


@distillation_loss("low_var_kl", "k3", reads=SAMPLED, keys=("loss_max_clamp",))
def sampled_k3(log_probs: Tensor, teacher: Tensor) -> Tensor:
    """q / p - 1 - log(q / p) of the sampled token: never negative, of low variance."""
    return kl_k3(log_probs, teacher)


@distillation_loss("forward_kl_topk", reads=TEACHERS_TOP, keys=("topk", "topk_tail", "log_prob_min_clamp"))
def forward_kl_topk(log_probs: Tensor, teacher: Tensor, config: DistillationLossConfig) -> Tensor:
    """sum of q (log q - log p) over the teacher's k likeliest tokens and, with `topk_tail`, all others as one.

    arXiv:2306.13649, with the sum cut to the top-k.
    """
    log_probs, teacher = _compared(log_probs, teacher, config)
    return (teacher.exp() * (teacher - log_probs)).sum(-1).clamp(min=0.0)


@distillation_loss("reverse_kl_topk", reads=STUDENTS_TOP, keys=("topk", "topk_tail", "log_prob_min_clamp"))
def reverse_kl_topk(log_probs: Tensor, teacher: Tensor, config: DistillationLossConfig) -> Tensor:
    """sum of p (log p - log q) over the policy's k likeliest tokens when it scored the batch, and the others as one.

    Over the teacher's top-k the sum would fall as mass leaves it. arXiv:2306.13649, with the sum cut to the top-k.
    """
    log_probs, teacher = _compared(log_probs, teacher, config)
    return (log_probs.exp() * (log_probs - teacher)).sum(-1)


def _compared(log_probs: Tensor, teacher: Tensor, config: DistillationLossConfig) -> tuple[Tensor, Tensor]:
    """Both log-probs [N, k], or [N, k + 1] with that of all other tokens together, bounded from below."""
    import torch

    pair = [log_probs, teacher]
    if config.topk_tail:
        pair = [torch.cat([values, log_of_rest(values)], -1) for values in pair]
    if config.log_prob_min_clamp is not None:
        pair = [values.clamp(min=config.log_prob_min_clamp) for values in pair]
    return pair[0], pair[1]


def log_of_rest(log_probs: Tensor) -> Tensor:
    """log(1 - sum of the probabilities) [N, 1] of log-probs [N, k]; at least log(1e-7), where rounding begins."""
    return (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=1e-7).log()


@distillation_loss("forward_kl", reads=WHOLE, keys=("temperature",))
def forward_kl(config: DistillationLossConfig) -> VocabularyDivergence:
    """KL(q || p) over the whole vocabulary. arXiv:2306.13649."""
    return MixedKL(reverse=0.0)


@distillation_loss("reverse_kl", reads=WHOLE, keys=("temperature",))
def reverse_kl(config: DistillationLossConfig) -> VocabularyDivergence:
    """KL(p || q) over the whole vocabulary. MiniLLM: Gu et al., arXiv:2306.08543."""
    return MixedKL(reverse=1.0)


@distillation_loss("mixed_kl", reads=WHOLE, keys=("mixed_kl_weight", "temperature"))
def mixed_kl(config: DistillationLossConfig) -> VocabularyDivergence:
    """(1 - w) KL(q || p) + w KL(p || q) over the whole vocabulary, w = `mixed_kl_weight`."""
    return MixedKL(reverse=config.mixed_kl_weight)


@distillation_loss("jsd", reads=WHOLE, keys=("beta", "temperature"))
def jsd(config: DistillationLossConfig) -> VocabularyDivergence:
    """b KL(q || m) + (1 - b) KL(p || m) with m = b q + (1 - b) p over the whole vocabulary, b = `beta`.

    Generalised Jensen-Shannon divergence; at b = 0 the forward KL, at b = 1 the reverse. GKD: arXiv:2306.13649.
    """
    if config.beta in (0.0, 1.0):
        return MixedKL(reverse=config.beta)
    return GeneralisedJSD(config.beta)


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
