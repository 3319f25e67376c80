"""Let megatron-core's linears add weight gradients to the gradient buffer as they multiply, without apex.

Reason: with `gradient_accumulation_fusion` Megatron asks for a module `fused_weight_gradient_mlp_cuda`, which is a part
of NVIDIA's apex. Without the option a linear makes its gradient in the model's dtype, and DDP adds it to the float32
buffer.
What it does: where apex has not been installed, a form in torch takes the module's place: one product that adds to the
buffer. On a CPU, whose kernels multiply one dtype, both factors of 16 bits become float32 first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from third_party_patches.guard import MEGATRON, Patch


class FusedWeightGradient:
    """apex's module, in torch. num_calls: of the process, for tests."""

    num_calls = 0

    @classmethod
    def wgrad_gemm_accum_fp32(cls, inputs: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        """main_grad [out, in] float32 += grad [tokens, out]^T @ inputs [tokens, in]."""
        cls.num_calls += 1
        rows, columns = grad.reshape(-1, grad.shape[-1]).t(), inputs.reshape(-1, inputs.shape[-1])
        if rows.dtype == main_grad.dtype:
            main_grad.addmm_(rows, columns)
        elif main_grad.is_cuda:
            torch.addmm(main_grad, rows, columns, out_dtype=main_grad.dtype, out=main_grad)
        else:
            main_grad.addmm_(rows.to(main_grad.dtype), columns.to(main_grad.dtype))

    @classmethod
    def wgrad_gemm_accum_fp16(cls, inputs: Tensor, grad: Tensor, main_grad: Tensor) -> None:
        """`wgrad_gemm_accum_fp32` into a buffer of the factors' own dtype."""
        cls.wgrad_gemm_accum_fp32(inputs, grad, main_grad)


def apply() -> None:
    """Give Megatron's linears the module, unless they found apex's."""
    from megatron.core.tensor_parallel import layers

    if not layers._grad_accum_fusion_available:
        vars(layers)["fused_weight_gradient_mlp_cuda"] = FusedWeightGradient
        layers._grad_accum_fusion_available = True


PATCH = Patch(MEGATRON, apply, drop_when="megatron-core fuses weight gradients with torch's own products")
