"""Linears and experts of vLLM that read e4m3 codes and block scales, and multiply with the weight that these stand for.

The product alone makes that weight, in the dtype of the engine, and drops it again: a model never has more than one of
its linears, or the matrix of one expert, in full. For CPUs; vLLM's own kernels of GPUs quantize what goes into the
product, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearMethodBase

from megatron_rl.hybrid_engine.block_codes import E4M3, SCALE, dequantized
from megatron_rl.parallel.scale_blocks import SCALES
from third_party_patches.vllm.unpacked_linear import plain_linear

WEIGHT = "weight"
EXPERTS = ("w13_weight", "w2_weight")
"""vLLM's names of the weight of a linear, and of the two stacks of experts."""


class BlockScaledLinear(LinearMethodBase):
    """Stands in for vLLM's method of an unquantized linear."""

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **attributes: Any) -> None:
        """Raise NotImplementedError: the layer has its weight before it gets this method."""
        raise NotImplementedError("FP8 weights replace a weight that exists")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Derive nothing: codes and scales are read where they are."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [..., in] times the weight [out, in], plus bias [out]."""
        return plain_linear(x, dequantized(layer.weight, getattr(layer, WEIGHT + SCALES), x.dtype), bias)


class CodedStack:
    """Matrices of experts as codes [E, rows, columns] and scales; each is made when it is asked for."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scales, self.dtype = codes, scales, dtype

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, expert: int) -> torch.Tensor:
        return dequantized(self.codes[expert], self.scales[expert], self.dtype)


def expect_codes(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Let every weight whose scales are among the tensors have parameters for codes and scales, on meta.

    The trainer's tensors are bound to them as to every parameter, which compares shapes and dtypes; the weight keeps
    the shape that vLLM gave it. Raises ValueError for a weight of a module that cannot read codes.
    """
    for name, module in model.named_modules():
        for kind in (WEIGHT, *EXPERTS):
            scales = tensors.get(f"{name}.{kind}{SCALES}")
            if scales is None:
                continue
            method: type = LinearMethodBase if kind == WEIGHT else UnquantizedFusedMoEMethod
            if not isinstance(getattr(module, "quant_method", None), method):
                raise ValueError(f"{name} of the rollout engine cannot read its {kind} as FP8")
            setattr(module, kind, on_meta(tuple(getattr(module, kind).shape), E4M3))
            module.register_parameter(kind + SCALES, on_meta(tuple(scales.shape), SCALE))
            if kind == WEIGHT:
                module.quant_method = BlockScaledLinear()


def read_codes_of_experts(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Let the experts that have scales read their codes; once vLLM has made their kernels. dtype: of the engine."""
    for module in model.modules():
        if EXPERTS[0] + SCALES in module._parameters:
            layer: Any = module
            layer.quant_method.moe_kernel.fused_experts.stacks = tuple(
                CodedStack(getattr(layer, kind), getattr(layer, kind + SCALES), dtype) for kind in EXPERTS
            )


def on_meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.nn.Parameter:
    """A parameter without memory, which the tensor of its name replaces."""
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
