"""Loads of experts, by hand."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.observe.expert_load import balance_metrics, expert_load_metrics


def test_loads_by_hand() -> None:
    """Two layers of four experts, one even and one not. Would not catch counts that are wrong before."""
    found = expert_load_metrics(torch.tensor([[5, 5, 5, 5], [10, 6, 4, 0]]), [0, 1])
    assert found == pytest.approx(
        {
            "actor/expert_load/max": 2.0,
            "actor/expert_load/mean": 1.5,
            "actor/expert_load/idle": 0.125,
            "actor/expert_load/layer_0": 1.0,
            "actor/expert_load/layer_1": 2.0,
        }
    )


def test_no_token_says_nothing() -> None:
    """Would not catch a layer without tokens among others."""
    assert expert_load_metrics(torch.zeros(2, 4, dtype=torch.int64), [0, 1]) == {}


def test_losses_by_hand() -> None:
    """Two layers, 1 and 3. Would not catch the two losses in each other's place before."""
    found = balance_metrics(torch.tensor([[1.0, 0.5], [2.0, 0.25]]), [1, 3])
    assert found == {
        "actor/moe_aux_loss/layer_1": 1.0,
        "actor/moe_aux_loss/layer_3": 2.0,
        "actor/moe_aux_loss/mean": 1.5,
        "actor/moe_z_loss/layer_1": 0.5,
        "actor/moe_z_loss/layer_3": 0.25,
        "actor/moe_z_loss/mean": 0.375,
    }
