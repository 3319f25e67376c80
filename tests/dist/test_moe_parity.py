"""Qwen3 and its experts: one batch and one update give the same numbers however layers and experts are spread."""

from __future__ import annotations

import pytest
import torch
from test_layout_parity import assert_same, collected, hugging_face_log_probs, relative, run_layout, whole_weights
from tiny_models import save_qwen3, save_qwen3_moe

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

SP = {"sequence_parallel": True}
EP2, ETP1 = {"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 1}
MOE_LAYOUTS = {
    "PP2": ((2, 1, 2), {}),
    "DP2, EP2": ((2, 1, 1), EP2),
    "TP2, ETP2": ((2, 2, 1), SP),
    "TP2, ETP1": ((2, 2, 1), SP | ETP1),
    "TP2, EP2, ETP1": ((2, 2, 1), SP | EP2 | ETP1),
    "TP2, DP2, EP2, ETP2": ((4, 2, 1), SP | EP2),
}
"""Name -> (ranks, tp, pp) and further sizes."""
DENSE_LAYOUTS = {"TP2": ((2, 2, 1), {}), "TP2, SP": ((2, 2, 1), SP), "TP2, PP2, SP": ((4, 2, 2), SP)}


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory) -> str:
    return save_qwen3_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def moe_reference(moe_path) -> list[dict]:
    return run_layout(moe_path, 1, 1, 1)


@pytest.fixture(scope="module")
def dense_path(tmp_path_factory) -> str:
    return save_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dense_reference(dense_path) -> list[dict]:
    return run_layout(dense_path, 1, 1, 1)


@pytest.mark.parametrize("layout", MOE_LAYOUTS)
def test_moe_layouts_equal_one_process(layout, moe_path, moe_reference) -> None:
    """Actor and critic. Would not catch an error in a router weight that moves no token elsewhere and no number."""
    ranks, sizes = MOE_LAYOUTS[layout]
    assert_same(run_layout(moe_path, *ranks, **sizes), moe_reference, moe_path)


@pytest.mark.parametrize("layout", DENSE_LAYOUTS)
def test_dense_layouts_equal_one_process(layout, dense_path, dense_reference) -> None:
    """Query and key norms, sequence parallelism, the value head. Would not catch what all layouts share."""
    ranks, sizes = DENSE_LAYOUTS[layout]
    assert_same(run_layout(dense_path, *ranks, **sizes), dense_reference, dense_path)
