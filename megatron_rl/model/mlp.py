"""The gated MLP for training: Megatron's linears with a gate between them that keeps and copies little."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from torch import Tensor


class SiluGate(torch.autograd.Function):
    """silu(a) * b of x [..., 2F] = [a; b] -> [..., F].

    Only x is kept, silu(a) is computed again in backward, whose two halves are written where x's gradient wants them.
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


def gate_sparingly(mlp: MLP) -> None:
    """Let a gated MLP without biases, which is what all dense families have, use `SiluGate`.

    Megatron's own gate adds an offset of 0 to one half, and keeps five tensors of the intermediate size for backward
    where this keeps three.
    """

    def forward(hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        mixed, _ = mlp.linear_fc1(hidden_states)
        out, _ = mlp.linear_fc2(SiluGate.apply(mixed))
        return out, None

    mlp.forward = forward
