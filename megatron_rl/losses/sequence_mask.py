"""The off-policy sequence mask of DeepSeek-V3.2, which goes with every policy loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.losses.policy import PolicyTokens
from megatron_rl.losses.rows import mean_counted, spread

if TYPE_CHECKING:
    from torch import Tensor


def sequence_mask(tokens: PolicyTokens, threshold: float) -> Tensor:
    """[N]: 0 where A < 0 and the response's mean of log(p_old / p) is above `threshold`, else 1; without a gradient.

    A response that the policy has left already is not pushed away further. The mean is over tokens that count.
    DeepSeek-AI, arXiv:2512.02556, eq. 9. Their p_old is the rollout's: here it is with `bypass_mode`, else the
    trainer's, and `rollout_rs` looks at the difference between the two. What is masked stays in the denominators.
    """
    distance = spread(mean_counted(tokens.k1, tokens.counts, tokens.lengths), tokens.lengths, len(tokens.counts))
    return 1.0 - ((tokens.advantages < 0) & (distance > threshold)).to(tokens.advantages.dtype)
