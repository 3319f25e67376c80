"""Replay of the engine's experts where not every layer has any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import run_ranks
from sweeps import often
from test_router_replay import BOUND, REPLAY, differences, tied_config
from tiny_gpt_oss import save_gpt_oss
from tiny_minimax import save_minimax
from tiny_models import save_qwen2_moe, save_qwen3_moe_with_dense_layers, tie_routers
from tiny_qwen3_5 import save_qwen3_5_moe

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

SAVED = {
    "Qwen3-MoE, experts in the last layer alone": save_qwen3_moe_with_dense_layers,
    "Qwen2-MoE, a dense layer on each stage": save_qwen2_moe,
    "gpt-oss, whose routers have biases": save_gpt_oss,
    "MiniMax-M2, by sigmoid scores": save_minimax,
    "Qwen3.5-MoE, linear layers on each stage": save_qwen3_5_moe,
}
OFTEN = ("Qwen3-MoE, experts in the last layer alone",)
FURTHER = ("MiniMax-M2, by sigmoid scores",)
"""What runs once a week: its layers lie as gpt-oss's do."""


@pytest.mark.parametrize("name", often(SAVED, OFTEN, FURTHER))
def test_the_engines_experts_make_log_probs_agree(name: str, tmp_path: Path) -> None:
    """On two stages, of which one may have no experts at all; routers are made to tie.

    Would not catch experts that are recorded right for layers that lie alike in engine and trainer only.
    """
    save: Callable[..., str] = SAVED[name]
    config = tied_config(tie_routers(save(tmp_path)), 1, 2, **{REPLAY: "R3"})
    found = [one for one in run_ranks(2, differences, config) if one is not None]
    for one in found:
        assert one["with"] < BOUND
        assert one["without"] > 2 * BOUND and 0.001 < one["others"] < 0.9
    assert found
