"""Losses that a client of the service asks for by name: sums over tokens, which several passes may add up.

Legend: N tokens of a micro-batch, each with its own log-prob p, given log-prob q and given weight or advantage A.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_rl.losses.policy import limited_exp

if TYPE_CHECKING:
    from torch import Tensor

Settings = Mapping[str, float]


@dataclass(frozen=True)
class SummedLoss:
    """A loss by name.

    function: (log-probs [N] with a gradient, given log-probs [N], weights or advantages [N], settings) -> what each
    token adds [N]. reads: names of what each datum has for every token; the last one is A. defaults: those settings.
    """

    function: Callable[[Tensor, Tensor, Tensor, Settings], Tensor]
    reads: tuple[str, ...]
    defaults: Mapping[str, float] = field(default_factory=dict)

    @property
    def reads_log_probs(self) -> bool:
        """Whether data have the log-probs with which they were sampled."""
        return "logprobs" in self.reads


def cross_entropy(log_probs: Tensor, _given: Tensor, weights: Tensor, _settings: Settings) -> Tensor:
    """-A p; A is any real number, so that this is the gate to every loss of log-probs."""
    return -weights * log_probs


def importance_sampling(log_probs: Tensor, given: Tensor, advantages: Tensor, _settings: Settings) -> Tensor:
    """-A e^(p - q)."""
    return -advantages * limited_exp(log_probs - given)


def ppo(log_probs: Tensor, given: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    """-min(A r, A r'), where r' is r = e^(p - q) within its two thresholds."""
    ratio = limited_exp(log_probs - given)
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -(advantages * ratio).minimum(advantages * clipped)


WEIGHTED, SAMPLED = ("weights",), ("logprobs", "advantages")

SUMMED_LOSSES: Mapping[str, SummedLoss] = {
    "cross_entropy": SummedLoss(cross_entropy, WEIGHTED),
    "importance_sampling": SummedLoss(importance_sampling, SAMPLED),
    "ppo": SummedLoss(ppo, SAMPLED, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
}
