"""Noting where tensors lie, and saying which has moved. Engines are in tests/parity."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.rollout.addresses import MovedTensorError, must_stay, places


def small() -> torch.nn.ModuleDict:
    """Two layers, of which the second shares the first one's bias."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "b": torch.nn.Linear(5, 3)})
    model["b"].bias = model["a"].bias
    return model


def test_writing_in_place_moves_nothing() -> None:
    """Every name, also a second one of the same tensor. Would not catch buffers, which nobody replaces."""
    model, cache = small(), torch.zeros(4)
    noted = places([model], [cache, cache[2:]])
    parameters = {f"parameter {name}" for name in ("a.weight", "a.bias", "b.weight", "b.bias")}
    assert noted.keys() == parameters | {"KV cache tensor 0", "KV cache tensor 1"}
    assert noted["KV cache tensor 1"] == noted["KV cache tensor 0"] + 8
    with torch.no_grad():
        model["a"].weight.mul_(2)
    model.load_state_dict(small().state_dict())
    must_stay(noted, places([model], [cache, cache[2:]]))


def test_what_moves_is_named() -> None:
    """Other data, another object under one of two names, another cache, one that is gone. By hand."""
    model, cache = small(), torch.zeros(4)
    noted = places([model], [cache])
    kept = model["b"].weight.data
    model["b"].weight.data = kept.clone()
    with pytest.raises(MovedTensorError, match=rf"moved since: parameter b\.weight \({kept.data_ptr():#x} when"):
        must_stay(noted, places([model], [cache]))
    model["b"].weight.data = kept
    model["b"].bias = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(MovedTensorError, match=r"moved since: parameter b\.bias \(") as said:
        must_stay(noted, places([model], [cache]))
    assert "a.bias" not in str(said.value)
    model["b"].bias = model["a"].bias
    with pytest.raises(MovedTensorError, match="KV cache tensor 0"):
        must_stay(noted, places([model], [torch.zeros(4)]))
    with pytest.raises(MovedTensorError, match=r"KV cache tensor 0 \(0x[0-9a-f]+ when the engine was built, none now"):
        must_stay(noted, places([model], []))
    with pytest.raises(MovedTensorError, match=r"parameter b\.weight .*, and 1 more\. Whoever"):
        moved = {name: place + 1 for name, place in noted.items() if name.startswith("parameter")}
        must_stay(moved, places([model], []))


def test_an_adapter_that_moves_is_named() -> None:
    """A layer of vLLM's has its adapter's buffers in tuples. Would not catch buffers of experts."""
    from vllm.lora.layers import BaseLayerWithLoRA

    layer = BaseLayerWithLoRA()
    layer.lora_a_stacked, layer.lora_b_stacked = (torch.ones(1, 1, 8, 4),) * 2, (torch.ones(1, 1, 6, 8),)
    layer.output_slices, model = (6, 4), torch.nn.ModuleDict({"q_proj": layer})
    noted = places([model], [])
    assert len(noted) == 3
    layer.lora_b_stacked[0].mul_(2)
    must_stay(noted, places([model], []))
    layer.lora_a_stacked = (layer.lora_a_stacked[0], layer.lora_a_stacked[1].clone())
    with pytest.raises(MovedTensorError, match=r"moved since: tensor 1 of q_proj\.lora_a_stacked \(0x[0-9a-f]+ when"):
        must_stay(noted, places([model], []))
