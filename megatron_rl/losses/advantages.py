"""Advantages of tokens, from a critic or from rewards to go.

Legend: B rows, R sampled tokens, right-padded; `mask [B, R]` is true on real tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., arXiv:1506.02438), over sampled tokens.

    delta_t = r_t + gamma * V_{t+1} - V_t with V = 0 after the last token;  A_t = delta_t + gamma * lam * A_{t+1}.
    rewards, values [B, R] float, R >= 0; lam: a number, or one for each row [B]. Returns (advantages [B, R], returns
    [B, R] = A + V); zero where `mask` is false.
    """
    advantages = rewards.new_zeros(rewards.shape)
    next_value = rewards.new_zeros(rewards.shape[0])
    next_advantage = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage).where(here, 0.0)
        next_value = values[:, t].where(here, 0.0)
        advantages[:, t] = next_advantage
    return advantages, (advantages + values).where(mask, 0.0)


def rewards_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} over the tokens of a row (Sutton and Barto, eq. 3.9): `gae` with lam 1 and no values.

    rewards [B, R] float -> [B, R]; zero where `mask` is false.
    """
    return gae(rewards, rewards.new_zeros(rewards.shape), mask, gamma, lam=1.0)[0]


def whiten(values: Tensor, eps: float = 1e-8) -> Tensor:
    """values [N] shifted and scaled to mean 0 and variance 1 (unbiased) over all N; 0 where they are all equal."""
    if (values == values[:1]).all():
        return values.new_zeros(values.shape)  # rounding differences would be scaled up
    return (values - values.mean()) * (values.var() + eps).rsqrt()
