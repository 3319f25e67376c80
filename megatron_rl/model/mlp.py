"""The gated MLP for training: Megatron's linear layers with a gate that keeps and copies little."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor


class SiluGate(torch.autograd.Function):
    """silu(a) * b of x [..., 2F] = [a; b] -> [..., F].

    Only x is kept. Backward computes silu(a) again and writes both halves of x's gradient in place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        a, b = x.chunk(2, dim=-1)
        return F.silu(a).mul_(b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        a, b = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_a, grad_b = grad_x.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * b, a, grad_input=grad_a)
        torch.mul(grad, F.silu(a), out=grad_b)
        return grad_x


class GeluGate(torch.autograd.Function):
    """gelu(a) * b with the tanh approximation of gelu; see `SiluGate`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        a, b = x.chunk(2, dim=-1)
        return F.gelu(a, approximate="tanh").mul_(b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        a, b = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_a, grad_b = grad_x.chunk(2, dim=-1)
        torch.ops.aten.gelu_backward.grad_input(grad * b, a, approximate="tanh", grad_input=grad_a)
        torch.mul(grad, F.gelu(a, approximate="tanh"), out=grad_b)
        return grad_x


GATES: dict[str, type[torch.autograd.Function]] = {"silu": SiluGate, "gelu_pytorch_tanh": GeluGate}
"""By config.json's name of the activation."""


def gate_sparingly(mlp: MLP, activation: str = "silu", norm_after: torch.nn.Module | None = None) -> None:
    """Let a gated MLP without biases, as all dense families have, use one of `GATES`.

    norm_after: the norm of its output, which becomes the MLP's `post_layernorm`. Megatron's own gate adds an offset of
    0 to one half and keeps five tensors of the intermediate size for backward; this one keeps three.
    """
    gate = GATES[activation]
    if norm_after is not None:
        mlp.post_layernorm = norm_after

    def forward(hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        mixed, _ = mlp.linear_fc1(hidden_states)
        out, _ = mlp.linear_fc2(gate.apply(mixed))
        return out if norm_after is None else norm_after(out), None

    mlp.forward = forward
