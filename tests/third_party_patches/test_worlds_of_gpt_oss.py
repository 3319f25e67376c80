"""vLLM's gpt-oss in a world of 7 ranks, of which each generates alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from third_party_patches.vllm import worlds_of_gpt_oss


def test_columns_that_the_world_does_not_divide(monkeypatch) -> None:
    """Without: an assertion about 2880 columns and 7 ranks. With: the layer is made of all columns. Would not catch a
    second question about the world.
    """
    from vllm.model_executor.models import gpt_oss

    made: dict[str, Any] = {}
    monkeypatch.setattr(gpt_oss, "dist", torch.distributed)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 7)
    monkeypatch.setattr(gpt_oss, "GateLinear", lambda *sizes, **options: torch.nn.Identity())
    monkeypatch.setattr(gpt_oss, "FusedMoEFactory", lambda **options: made.update(options) or torch.nn.Identity())
    sizes = SimpleNamespace(num_local_experts=32, hidden_size=2880, num_experts_per_tok=4, intermediate_size=2880)
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=sizes),
        quant_config=None,
        lora_config=None,
        parallel_config=SimpleNamespace(use_sequence_parallel_moe=False),
    )
    with pytest.raises(AssertionError):
        gpt_oss.MLPBlock(config, 0)
    worlds_of_gpt_oss.apply()
    gpt_oss.MLPBlock(config, 0)
    assert made["intermediate_size"] == 2880
