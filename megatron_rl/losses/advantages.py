"""Advantages of tokens, from a critic or from rewards to go.

Legend: B rows, R response positions, right-padded; `mask [B, R]` is true on real tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., arXiv:1506.02438), over response tokens.

    delta_t = r_t + gamma * V_{t+1} - V_t with V = 0 after the last token;  A_t = delta_t + gamma * lam * A_{t+1}.
    rewards, values [B, R] float, R >= 0 -> (advantages [B, R], returns [B, R] = A + V); zero where `mask` is false.
    """
    advantages = torch.zeros_like(rewards)
    next_value = rewards.new_zeros(rewards.shape[0])
    next_advantage = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, 0.0)
        next_value = torch.where(here, values[:, t], 0.0)
        advantages[:, t] = next_advantage
    return advantages, torch.where(mask, advantages + values, 0.0)


def rewards_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} over the tokens of a row (Sutton and Barto, eq. 3.9).

    rewards [B, R] float -> [B, R]; zero where `mask` is false. The same as `gae` with lambda 1 and no values.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)[0]


def whiten(values: Tensor, eps: float = 1e-8) -> Tensor:
    """values [N] shifted and scaled to mean 0 and variance 1 (unbiased) over all N; 0 where they are all equal."""
    if (values == values[:1]).all():
        return torch.zeros_like(values)  # else what rounding left of their differences would be blown up
    return (values - values.mean()) * torch.rsqrt(values.var() + eps)
