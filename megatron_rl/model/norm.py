"""RMSNorm that works with sequence parallelism and on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.device import has_fused_norm


class CpuNorm(torch.autograd.Function):
    """RMS norm in float32 on CPUs. Torch's own walks through memory twice as often in backward.

    With r = 1 / rms(x) and y = r x w:  dx = r g w - x r^3 (g x . w) / H,  dw = sum over rows of r g x.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        inverse = norms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        out: torch.Tensor = (rows * inverse).mul_(weight).view(x.shape)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
        product = grads * rows
        grad_weight = torch.mv(product.t(), inverse[:, 0])
        along = torch.mv(product, weight)[:, None] * inverse.pow(3) / x.shape[-1]
        grad_x = torch.mul(grads, weight, out=product).mul_(inverse).addcmul_(rows, along, value=-1)
        return grad_x.view(x.shape), grad_weight, None


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dim (Zhang and Sennrich, arXiv:1910.07467).

    Megatron's torch norm refuses sequence parallelism; here the weight carries the mark that makes
    `finalize_model_grads` sum its gradient over TP ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        weight: Any = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        weight.sequence_parallel = config.sequence_parallel
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> same shape."""
        if x.dtype == torch.float32 and not has_fused_norm(x):
            out: torch.Tensor = CpuNorm.apply(x, self.weight, self.eps)
            return out
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def bare_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm of x [..., size] without a weight, in float32."""
    wide, size = x.float(), x.shape[-1]
    if has_fused_norm(x):
        return F.rms_norm(wide, (size,), None, eps).type_as(x)
    out: torch.Tensor = CpuNorm.apply(wide, wide.new_ones(size), eps)
    return out.type_as(x)


class JointNormFunction(torch.autograd.Function):
    """RMS norm over the last dim of all ranks of a group together, of which each has a part. In float32.

    With r = 1 / rms(x) over H elements of all ranks:  dx = r g w - x r^3 (sum over ranks of g w . x) / H.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, group: Any) -> torch.Tensor:
        wide = x.float()
        inverse = wide.square().sum(-1, keepdim=True)
        ctx.total = x.shape[-1] * group.size()
        if group.size() > 1:
            torch.distributed.all_reduce(inverse, group=group)
        inverse.div_(ctx.total).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.group = group
        return (wide * inverse).mul_(weight).type_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        wide, grads = x.float(), grad.float()
        grad_weight = (grads * wide).mul_(inverse).flatten(0, -2).sum(0)
        along = grads.mul(weight)
        shared = (along * wide).sum(-1, keepdim=True)
        if ctx.group.size() > 1:
            torch.distributed.all_reduce(shared, group=ctx.group)
        shared.mul_(inverse.pow(3)).div_(ctx.total)
        grad_x = along.mul_(inverse).addcmul_(wide, shared, value=-1)
        return grad_x.type_as(x), grad_weight.type_as(weight), None, None


class JointNorm(torch.nn.Module):
    """RMSNorm of queries or keys over all heads together; `weight` [N * D] is that of this TP rank's heads.

    num_heads: N, of this rank. group: the TP ranks, all of which must call.
    """

    def __init__(self, config: Any, num_heads: int, head_size: int, group: Any) -> None:
        super().__init__()
        self.eps, self.group = config.layernorm_epsilon, group
        self.weight = torch.nn.Parameter(torch.ones(num_heads * head_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., N, D] -> same shape."""
        out: torch.Tensor = JointNormFunction.apply(x.flatten(-2), self.weight, self.eps, self.group)
        return out.view(x.shape)


class ZeroCentredNorm(RMSNorm):
    """RMSNorm whose weight w stands for 1 + w. The sum is made in float32, as in transformers and vLLM."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> same shape."""
        weight, wide = self.weight.float() + 1.0, x.float()
        if has_fused_norm(x):
            return F.rms_norm(wide, (x.shape[-1],), weight, self.eps).type_as(x)
        out: torch.Tensor = CpuNorm.apply(wide, weight, self.eps)
        return out.type_as(x)
