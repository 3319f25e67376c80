"""Sequences cut over context-parallel ranks: one batch and one update give the numbers of one process."""

from __future__ import annotations

import pytest
from test_layout_parity import assert_same, often, run_layout
from tiny_models import save_qwen2, save_qwen3_moe

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

CP = "context_parallel_size"
HOW = "override_transformer_config__cp_comm_type"
SP = {"sequence_parallel": True}
EP2, ETP1 = {"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 1}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
RECOMPUTED = {
    "full": {
        "override_transformer_config__recompute_granularity": "full",
        "override_transformer_config__recompute_method": "uniform",
        "override_transformer_config__recompute_num_layers": 2,
    },
    "selective": {"override_transformer_config__recompute_granularity": "selective"},
}
LAYOUTS = {
    "CP2, p2p": ((2, 1, 1), {CP: 2, HOW: "p2p"}),
    "CP2, all_gather": ((2, 1, 1), {CP: 2, HOW: "all_gather"}),
    "CP2, a2a": ((2, 1, 1), {CP: 2, HOW: "a2a"}),
    "CP4, p2p": ((4, 1, 1), {CP: 4, HOW: "p2p"}),
    "CP4, all_gather": ((4, 1, 1), {CP: 4, HOW: "all_gather"}),
    "CP4, a2a": ((4, 1, 1), {CP: 4, HOW: "a2a"}),
    "TP2, CP2, SP, p2p": ((4, 2, 1), {CP: 2, HOW: "p2p"} | SP),
    "TP2, CP2, a2a": ((4, 2, 1), {CP: 2, HOW: "a2a"}),
    "PP2, CP2, all_gather": ((4, 1, 2), {CP: 2, HOW: "all_gather"}),
    "PP2, VPP2, CP2, p2p": ((4, 1, 2), {CP: 2, HOW: "p2p"} | VPP2),
    "DP2, CP2, p2p": ((4, 1, 1), {CP: 2, HOW: "p2p"}),
    "CP2, p2p, full recomputation": ((2, 1, 1), {CP: 2, HOW: "p2p"} | RECOMPUTED["full"]),
    "CP2, a2a, selective recomputation": ((2, 1, 1), {CP: 2, HOW: "a2a"} | RECOMPUTED["selective"]),
}
"""Name -> (ranks, tp, pp) and further sizes."""
OFTEN = ("TP2, CP2, SP, p2p", "PP2, CP2, all_gather")


def options(packed: bool, dynamic: bool) -> dict:
    return {}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model_path) -> list[dict]:
    return run_layout(model_path, 1, 1, 1)


@pytest.mark.parametrize("layout", often(LAYOUTS, OFTEN))
def test_layout_equals_one_process(layout, model_path, reference) -> None:
    sizes, keys = LAYOUTS[layout]
    assert_same(run_layout(model_path, *sizes, **keys), reference, model_path)
