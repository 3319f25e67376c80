"""The soft penalty of long answers."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.scoring.overlong import overlong_penalty


def test_by_hand():
    """At most 10 tokens, the last 4 of them penalised up to 0.5. Would not catch lengths without their end token."""
    found = overlong_penalty(torch.tensor([1, 6, 7, 9, 10]), max_length=10, buffer=4, factor=0.5)
    assert found.tolist() == pytest.approx([0.0, 0.0, -0.125, -0.375, -0.5])
    assert found.dtype == torch.float32
