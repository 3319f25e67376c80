"""Layers of a model with experts: which of them have any, and the MLP that every token passes beside them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from megatron_rl.model.families import Routing
from megatron_rl.model.mlp import SiluGate


def layer_settings(routing: Routing, num_layers: int) -> dict[str, Any]:
    """The part of Megatron's configuration that says where experts are, and what lies beside them."""
    settings: dict[str, Any] = {}
    if routing.dense_layers:
        settings["moe_layer_freq"] = [int(layer not in routing.dense_layers) for layer in range(num_layers)]
    if routing.shared_size:
        settings["moe_shared_expert_intermediate_size"] = routing.shared_size
        settings["moe_shared_expert_gate"] = routing.shared_gate
    return settings


def has_experts(config: Any, layer: int) -> bool:
    """Whether a layer, counted over the whole model, has experts under Megatron's configuration."""
    if not config.num_moe_experts:
        return False
    return isinstance(config.moe_layer_freq, int) or bool(config.moe_layer_freq[layer])


class SharedExpertsLayer(SharedExpertMLP):
    """Megatron's, with the gate of `mlp.py`, which keeps less. Under sequence parallelism in and out are this rank's
    part of the sequence, as is what scales it.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [S, B, H] -> the same shape."""
        mixed, _ = self.linear_fc1(hidden_states)
        output, _ = self.linear_fc2(SiluGate.apply(mixed))
        out: Tensor = output
        if self.gate_weight is not None:
            out = output * torch.sigmoid(F.linear(hidden_states, self.gate_weight))
        return out
