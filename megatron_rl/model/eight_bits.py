"""FP8 on a CPU: what goes into a linear layer's products is rounded as FP8 rounds it, and multiplied as before.

Scales follow transformer-engine's recipes: blockwise, powers of two for 128 elements of a token and for 128 x 128 of a
weight (DeepSeek-V3, arXiv:2412.19437, section 3.3); tensorwise, one scale of the present maximum. What it rounds again
along tokens, for weight gradients, is here rounded once, along features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.config.megatron import FP8_RECIPES
from megatron_rl.model.families import is_in_eight_bits

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENTS = {"e4m3": E4M3, "hybrid": E5M2}
"""Format -> dtype of gradients; the other factors are always e4m3."""
BLOCK = 128


def rounded(x: Tensor, dtype: torch.dtype, tile: tuple[int, int] | None) -> Tensor:
    """Return x [..., C] as `dtype` holds it, in x's own dtype. tile: rows and columns with one scale, a power of two;
    None: one scale for all of x.
    """
    wide, largest = x.reshape(-1, x.shape[-1]).float(), torch.finfo(dtype).max
    if tile is None:
        scale = wide.abs().amax().clamp(min=torch.finfo(torch.float32).tiny) / largest
        out: Tensor = (wide / scale).to(dtype).float() * scale
        return out.view(x.shape).to(x.dtype)
    num_rows, num_columns = wide.shape
    tiles = F.pad(wide, (0, -num_columns % tile[1], 0, -num_rows % tile[0]))
    tiles = tiles.unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0]))
    most = tiles.abs().amax((1, 3), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny * largest)
    scale = torch.exp2(torch.ceil(torch.log2(most / largest)))
    whole: Tensor = ((tiles / scale).to(dtype).float() * scale).flatten(2, 3).flatten(0, 1)
    # Products of a tensor with gaps take a hundred times as long.
    return whole[:num_rows, :num_columns].contiguous().view(x.shape).to(x.dtype)


class RoundedFactor(torch.autograd.Function):
    """A factor of a product in the place of `x`, whose gradient it hands on: rounding has no slope."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        return factor.view_as(factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class RoundedGradient(torch.autograd.Function):
    """The identity; its gradient is rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, tile: tuple[int, int] | None) -> Tensor:
        ctx.dtype, ctx.tile = dtype, tile
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return rounded(grad, ctx.dtype, ctx.tile), None, None


class EightBitProduct:
    """Stands in for the product of one of Megatron's linears.

    Like transformer-engine it keeps the rounded weight until the linear's `is_first_microbatch` is set. Megatron's
    schedules set it at the beginning of every pass over micro-batches.
    """

    def __init__(self, linear: Any, fp8: str, recipe: str) -> None:
        self.linear, self.product, self.recipe = linear, linear._forward_impl, recipe
        self.gradients = GRADIENTS[fp8]
        self.weight: Tensor | None = None
        self.tile = (1, BLOCK) if recipe == "blockwise" else None
        self.weight_tile = (BLOCK, BLOCK) if recipe == "blockwise" else None
        linear.is_first_microbatch = True

    def __call__(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:  # noqa: A002  Megatron's own name
        """input [..., in] times weight [out, in]. Raises ValueError for a number of tokens that FP8 products do not
        take."""
        tokens, multiple = math.prod(input.shape[:-1]), FP8_RECIPES[self.recipe]
        if tokens % multiple:
            raise ValueError(f"{self.recipe} products take a multiple of {multiple} tokens, and a pass has {tokens}")
        if self.linear.is_first_microbatch or self.weight is None:
            self.weight = rounded(weight.detach(), E4M3, self.weight_tile)
            self.linear.is_first_microbatch = False
        factor = rounded(input.detach(), E4M3, self.tile)
        out = self.product(
            input=RoundedFactor.apply(input, factor), weight=RoundedFactor.apply(weight, self.weight), **options
        )
        result: Tensor = RoundedGradient.apply(out, self.gradients, self.tile)
        return result


def emulate_eight_bits(chunks: Iterable[Any]) -> None:
    """Round in all linears of attention and MLPs of the chunks, as their configuration's `fp8` and `fp8_recipe` say."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if is_in_eight_bits(f"{name}.weight"):
                module._forward_impl = EightBitProduct(module, chunk.config.fp8, chunk.config.fp8_recipe)


def eight_bit_bytes(chunks: Iterable[Any]) -> int:
    """Bytes of the rounded weights that the chunks keep."""
    products = [getattr(module, "_forward_impl", None) for chunk in chunks for module in chunk.modules()]
    weights = [product.weight for product in products if isinstance(product, EightBitProduct)]
    return sum(weight.nbytes for weight in weights if weight is not None)
