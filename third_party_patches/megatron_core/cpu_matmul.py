"""Multiply with oneDNN in megatron-core's linears on CPUs.

Reason: torch multiplies float32 matrices with MKL. On processors not made by Intel, MKL is slower than oneDNN: 70 to 97
GFLOPS per core for these shapes, against 95 to 106.
What it does: the forward pass of tensor-parallel linears, and the gradient of their input on one TP rank, use the
oneDNN kernel of the rollout's linears for float32. Results differ in the last bits. The gradient of the weight stays
with MKL, as oneDNN is no faster where both factors are transposed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from third_party_patches.guard import MEGATRON, Patch
from third_party_patches.megatron_core.cpu_torch import ModuleProxy

LAYERS = "megatron.core.tensor_parallel.layers"
NAME = "backward_with_onednn"


def matmul(x: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [..., k] times a matrix [k, n]; torch's own kernel does what oneDNN's cannot.

    OneDNN's kernel has no gradient, so it is used only where autograd records nothing, as in the forward of an autograd
    function.
    """
    plain = out is not None or torch.is_grad_enabled() or other.dim() != 2
    if plain or x.dtype != torch.float32 or other.dtype != torch.float32:
        return torch.matmul(x, other, out=out)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, other.t(), None, "none", [], "")
    return product


Backward = Callable[[Any, torch.Tensor], tuple[torch.Tensor | None, ...]]


def with_matmul(megatrons: Backward) -> Backward:
    """Return a linear's backward with `matmul` for the input's gradient, used without communication and fusion."""

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_ranks = ctx.sequence_parallel or ctx.allreduce_dgrad
        if needs_ranks or ctx.gradient_accumulation_fusion or ctx.grad_output_buffer is not None:
            return megatrons(ctx, grad)
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        with torch.no_grad():
            grad_x = matmul(grad, weight)
        grad_bias = rows.sum(0) if ctx.use_bias else None
        others = [None] * (len(ctx.needs_input_grad) - 3)
        return grad_x, rows.t().matmul(x.reshape(-1, x.shape[-1])), grad_bias, *others

    backward.__name__ = NAME
    return backward


def apply() -> None:
    """Give the module another `torch.matmul` and its linear another backward; a second call changes nothing."""
    layers = importlib.import_module(LAYERS)
    seen = vars(layers)["torch"]
    if vars(seen).get("matmul") is not matmul:
        vars(layers)["torch"] = ModuleProxy(seen, {"matmul": matmul})
    linear = vars(layers)["LinearWithGradAccumulationAndAsyncCommunication"]
    if linear.backward.__name__ != NAME:
        linear.backward = staticmethod(with_matmul(linear.backward))


PATCH = Patch(MEGATRON, apply, drop_when="torch multiplies float32 matrices with oneDNN, or as fast, on every CPU")
