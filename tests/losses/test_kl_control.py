"""The weight of the KL penalty."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.config.algorithm_keys import KlCtrlConfig
from megatron_rl.config.schema import RunConfig
from megatron_rl.controller.algorithm import Algorithm
from megatron_rl.losses.kl import AdaptiveKL, FixedKL
from megatron_rl.observe.phase_clock import PhaseClock
from megatron_rl.records import ragged, ragged_from_lengths, single_turn


def test_fixed_stays() -> None:
    """Would not catch a weight that somebody else changes."""
    control = FixedKL(0.01)
    control.update(100.0, 512)
    assert control.coef == 0.01


@pytest.mark.parametrize(
    ("kl", "coef"),
    [
        (0.1, 0.01),  # on target
        (0.11, 0.01 * (1 + 0.1 * 512 / 10000)),  # 10% above
        (0.09, 0.01 * (1 - 0.1 * 512 / 10000)),
        (5.0, 0.01 * (1 + 0.2 * 512 / 10000)),  # the error is clipped
        (-1.0, 0.01 * (1 - 0.2 * 512 / 10000)),  # the k1 estimate may be negative
    ],
)
def test_adaptive_by_hand(kl: float, coef: float) -> None:
    """One update of 512 samples. Would not catch an update with the wrong number of samples."""
    control = AdaptiveKL(0.01, target_kl=0.1, horizon=10000)
    control.update(kl, 512)
    assert control.coef == pytest.approx(coef, rel=1e-12)


def test_answers_without_a_token_are_no_samples() -> None:
    """A KL of 0.12 beside an empty answer is 20% above the target of 0.1, for one sample of a horizon of 10.

    As a KL of 0 it would make 0.06 of two. Would not catch a step whose KL is not in the reward.
    """
    config = RunConfig()
    config.algorithm.use_kl_in_reward = True
    config.algorithm.kl_ctrl = KlCtrlConfig("adaptive", kl_coef=0.01, target_kl=0.1, horizon=10)
    algorithm = Algorithm(config, PhaseClock(lambda phase: None))
    lengths = torch.tensor([1, 0])
    experience = single_turn(
        ragged([torch.tensor([1, 2]), torch.tensor([3])]),
        lengths,
        rollout_log_probs=ragged_from_lengths(torch.tensor([-1.0]), lengths),
        scores=torch.zeros(2),
        old_log_probs=ragged_from_lengths(torch.tensor([-1.0]), lengths),
        ref_log_probs=ragged_from_lengths(torch.tensor([-1.12]), lengths),
    )
    metrics = algorithm.penalise_kl(experience)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.12, abs=1e-6)
    assert algorithm.kl_ctrl.coef == pytest.approx(0.01 * (1 + 0.2 / 10), abs=1e-8)


def test_adaptive_reaches_its_target() -> None:
    """In a world where the KL falls as its weight grows. Would not catch a slow approach."""
    control = AdaptiveKL(1e-4, target_kl=0.1, horizon=1000)
    for _ in range(400):
        kl = 0.001 / control.coef
        control.update(kl, 512)
    assert kl == pytest.approx(0.1, rel=0.01)
