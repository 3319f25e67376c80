"""The weight of the KL penalty."""

from __future__ import annotations

import pytest

from megatron_rl.losses.kl import AdaptiveKL, FixedKL


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


def test_adaptive_reaches_its_target() -> None:
    """In a world where the KL falls as its weight grows. Would not catch a slow approach."""
    control = AdaptiveKL(1e-4, target_kl=0.1, horizon=1000)
    for _ in range(400):
        kl = 0.001 / control.coef
        control.update(kl, 512)
    assert kl == pytest.approx(0.1, rel=0.01)
