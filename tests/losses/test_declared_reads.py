"""What losses declare that they read is what their value depends on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_policy_variants import actor

from megatron_rl.config.declarations import POLICY_LOSSES, PREFERENCE_LOSSES, REWARD_MODEL_LOSSES
from megatron_rl.config.tasks import DPOConfig, RewardTrainingConfig
from megatron_rl.losses.objectives import preference_objective, reward_objective
from megatron_rl.losses.policy import PolicyTokens, load_policy_loss
from megatron_rl.losses.terms import Answers


def drawn(seed: int, *size: int) -> torch.Tensor:
    return torch.rand(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("mode", [*POLICY_LOSSES])
def test_policy_losses_depend_on_the_columns_that_they_declare(mode: str) -> None:
    """Each column changed alone, the loss of 12 tokens of near ratios. Would not catch a column that only metrics read,
    nor one that a loss reads where ratios are far from 1."""
    lengths = torch.tensor([5, 4, 3])
    log_probs = -drawn(1, 12) - 0.5
    tokens = PolicyTokens(
        log_probs, log_probs + 0.1 * (drawn(2, 12) - 0.5), drawn(3, 12) - 0.5, lengths, rollout_weights=drawn(4, 12)
    )
    config = actor(mode, clip_cov_ratio=0.2)
    loss = load_policy_loss(config)
    changed = {
        "old_log_probs": tokens.old_log_probs + 0.05 * (drawn(5, 12) - 0.5),
        "advantages": tokens.advantages * (1 + drawn(6, 12)),
        "rollout_weights": drawn(7, 12),
    }
    before = loss(tokens, config).loss
    read = {
        name
        for name, column in changed.items()
        if not loss(replace(tokens, **{name: column}), config).loss.equal(before)
    }
    assert read == set(POLICY_LOSSES[mode].traits.reads)


def answers_of(is_alone: bool) -> Answers:
    """Two prompts, with an answer each or with two and three."""
    sizes = torch.tensor([1, 1] if is_alone else [2, 3])
    number = int(sizes.sum())
    lengths = torch.arange(number) + 1
    return Answers(-drawn(1, number), -drawn(2, number), torch.arange(number) % 2.0, sizes, torch.tensor(0.1), lengths)


@pytest.mark.parametrize(
    ("losses", "config", "objective"),
    [
        (PREFERENCE_LOSSES, DPOConfig(), preference_objective),
        (REWARD_MODEL_LOSSES, RewardTrainingConfig(use_margins=True), reward_objective),
    ],
    ids=["preferences", "reward models"],
)
def test_losses_of_answers_depend_on_the_columns_that_they_declare(losses, config, objective) -> None:
    """Each column changed alone. Would not catch a column that only metrics read."""
    for name, declared in losses.items():
        config.loss = [name] if losses is PREFERENCE_LOSSES else name
        answers = answers_of(declared.traits.alone)
        number = len(answers.numbers)
        changed = {"given": answers.given - drawn(3, number), "labels": 1 - answers.labels}
        before = objective(config)(answers).loss
        read = {
            name
            for name, column in changed.items()
            if not objective(config)(replace(answers, **{name: column})).loss.equal(before)
        }
        assert read == set(declared.traits.reads), name
