"""How far an export's logits may be from the trainer's."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.controller.report import export_bound


@pytest.mark.parametrize(
    ("logits", "bound"), [([], 1e-4), ([3.0, -9.0], 1e-4), ([3.0, -34.0], 3.4e-4), ([float("nan")], 1e-4)]
)
def test_the_bound_grows_with_the_logits(logits: list[float], bound: float) -> None:
    """A hundred-thousandth of the largest, at least 1e-4. Would not catch a model whose layers lose more digits."""
    assert export_bound(torch.tensor(logits)) == pytest.approx(bound, rel=1e-6)
