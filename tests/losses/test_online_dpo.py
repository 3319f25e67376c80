"""Online DPO's advantages make the gradient of DPO's loss on the pairs that scores choose."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.config.algorithm_keys import AlgorithmConfig
from megatron_rl.losses.estimators import Samples
from megatron_rl.losses.online_dpo import estimate_online_dpo

LENGTHS = torch.tensor([3, 2, 4, 1, 2, 0, 3, 2])
GROUPS = torch.tensor([5, 5, 5, 7, 7, 7, 9, 9])
SCORES = torch.tensor([0.0, 1.0, 0.5, 1.0, 0.0, 0.5, 1.0, 1.0])  # of the last group all score alike
PAIRS = ((1, 0), (3, 4))
BETA = 0.3


def samples_of(policy: torch.Tensor, reference: torch.Tensor) -> Samples:
    rewards = torch.zeros(len(policy), dtype=policy.dtype)
    ends = LENGTHS.cumsum(0)[LENGTHS > 0] - 1
    rewards[ends] = SCORES[LENGTHS > 0].to(policy.dtype)
    scores = SCORES.to(policy.dtype)
    return Samples(rewards, LENGTHS, GROUPS, scores, old_log_probs=policy, ref_log_probs=reference)


def test_the_gradient_is_that_of_dpo():
    """Of the sum over pairs, in float64; an answer without a token is in the second group. Would not catch an update
    that is not a step's first.
    """
    generator = torch.Generator().manual_seed(0)
    size = int(LENGTHS.sum())
    policy, reference = -torch.rand(2, size, generator=generator, dtype=torch.float64)
    policy.requires_grad_()
    rows = torch.repeat_interleave(LENGTHS)
    ratios = torch.zeros(len(LENGTHS), dtype=torch.float64).index_add(0, rows, policy - reference)
    loss = sum(-torch.nn.functional.logsigmoid(BETA * (ratios[best] - ratios[worst])) for best, worst in PAIRS)
    (expected,) = torch.autograd.grad(loss, policy)
    keys = AlgorithmConfig(adv_estimator="online_dpo", online_dpo_beta=BETA)
    advantages, returns = estimate_online_dpo(samples_of(policy.detach(), reference), keys)
    # A policy loss has the gradient -A per token, and weighs groups of three by 1/3 of its rows.
    torch.testing.assert_close(-advantages / 3, expected, atol=1e-12, rtol=1e-12)
    assert returns.equal(advantages)


def test_a_pair_at_equal_ratios():
    """By hand: sigma(0) is 1/2, so in a group of two a token gets 2 b / 2. Would not catch the sign of the margin."""
    zeros = torch.zeros(2)
    pair = Samples(
        torch.tensor([1.0, 0.0]), torch.tensor([1, 1]), torch.tensor([0, 0]), torch.tensor([1.0, 0.0]),
        old_log_probs=zeros, ref_log_probs=zeros,
    )  # fmt: skip
    advantages, _ = estimate_online_dpo(pair, AlgorithmConfig(online_dpo_beta=0.1))
    assert advantages.tolist() == pytest.approx([0.1, -0.1])
