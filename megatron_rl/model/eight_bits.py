"""FP8 on a CPU: what goes into a linear layer's products is rounded as FP8 rounds it, and multiplied as before.

Scales follow transformer-engine's recipes: blockwise, powers of two for 128 elements of a token and for 128 x 128 of a
weight (DeepSeek-V3, arXiv:2412.19437, section 3.3); tensorwise, one scale of the present maximum. Every expert has
scales of its own, for its matrices and for its tokens. What transformer-engine rounds again along tokens, for weight
gradients, is here rounded once, along features.

Megatron's configuration does not have it: its own `fp8` calls transformer-engine, for recomputed layers too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.config.megatron import FP8_RECIPES
from megatron_rl.model.families import is_emulated
from megatron_rl.model.families.adapter_params import STACKED

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENTS = {"e4m3": E4M3, "hybrid": E5M2}
"""Format -> dtype of gradients; the other factors are always e4m3."""
BLOCK = 128


def rounded(x: Tensor, dtype: torch.dtype, tile: tuple[int, int] | None) -> Tensor:
    """Return x [..., C] as `dtype` holds it, in x's own dtype. tile: rows and columns with one scale, a power of two;
    None: one scale for all of x.
    """
    if not x.numel():  # an expert without tokens
        return x
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


class SameGradient(torch.autograd.Function):
    """Another value in the place of `x`, whose gradient it hands on, such as x rounded: rounding has no slope."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class FusedFactor(torch.autograd.Function):
    """`SameGradient` of a weight to whose `main_grad` Megatron's linear adds the gradient; only the weight's own mark
    keeps DDP from adding it again."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: Tensor) -> Tensor:
        ctx.weight = weight
        return factor.view_as(factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        vars(ctx.weight)["grad_added_to_main_grad"] = True
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


class Rounding(NamedTuple):
    """Rounding by `fp8` and `fp8_recipe`. gradients: their dtype; the other factors are always e4m3."""

    gradients: torch.dtype
    recipe: str

    @property
    def tile(self) -> tuple[int, int] | None:
        """Rows and columns of a scale of inputs and gradients; None: one scale."""
        return (1, BLOCK) if self.recipe == "blockwise" else None

    def weight(self, weight: Tensor) -> Tensor:
        """Return a weight [out, in] rounded."""
        return rounded(weight, E4M3, (BLOCK, BLOCK) if self.recipe == "blockwise" else None)

    def input(self, x: Tensor) -> Tensor:
        """Return x [..., in] in the place of x, rounded."""
        result: Tensor = SameGradient.apply(x, rounded(x.detach(), E4M3, self.tile))
        return result

    def output(self, out: Tensor) -> Tensor:
        """Return a product whose gradient is rounded."""
        result: Tensor = RoundedGradient.apply(out, self.gradients, self.tile)
        return result


class KeptWeight:
    """A rounded weight, kept from the first product of a pass over micro-batches to the last, as transformer-engine
    keeps it: where `is_stale` the next product rounds again. A recomputed product reads the same.
    """

    def __init__(self, rounding: Rounding) -> None:
        self.rounding = rounding
        self.weight: Tensor | None = None
        self.is_stale = True

    def kept(self, weight: Tensor) -> Tensor:
        """Return a weight [out, in], or a stack [E, out, in], rounded."""
        if self.is_stale or self.weight is None:
            matrices = weight.detach().unbind() if weight.dim() == 3 else None
            round_one = self.rounding.weight
            self.weight = torch.stack([*map(round_one, matrices)]) if matrices else round_one(weight.detach())
            self.is_stale = False
        return self.weight


class EightBitProduct(KeptWeight):
    """Stands in for the product of one linear: `_forward_impl`, which takes and returns what Megatron's does."""

    def __init__(self, product: Callable[..., Tensor], rounding: Rounding) -> None:
        super().__init__(rounding)
        self.product = product

    def __call__(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:  # noqa: A002  Megatron's own name
        """input [..., in] times weight [out, in]. Raises ValueError for a number of tokens that FP8 products do not
        take."""
        recipe = self.rounding.recipe
        tokens, multiple = math.prod(input.shape[:-1]), FP8_RECIPES[recipe]
        if tokens % multiple:
            raise ValueError(f"{recipe} products take a multiple of {multiple} tokens, and a pass has {tokens}")
        is_fused = options.get("gradient_accumulation_fusion", False) and hasattr(weight, "main_grad")
        factor = (FusedFactor if is_fused else SameGradient).apply(weight, self.kept(weight))
        if is_fused:
            vars(factor).update(main_grad=vars(weight)["main_grad"], grad_added_to_main_grad=False)
        return self.rounding.output(self.product(input=self.rounding.input(input), weight=factor, **options))


class EightBitStack(KeptWeight):
    """The products of a stack of experts' matrices.

    transformer-engine fills the tokens of each expert up with zeros, which change no scale, so any number fits here.
    """

    def linears(self, stack: Tensor) -> list[Callable[..., Tensor]]:
        """Return the product with each matrix [O, I] of a stack: [T, I] -> [T, O], plus a `bias`."""
        # Unbound at once: indexing a stack makes a gradient as large as the stack, for each expert.
        pairs = zip(stack.unbind(), self.kept(stack).unbind(), strict=True)
        return [partial(self._product, matrix, kept) for matrix, kept in pairs]

    def _product(self, matrix: Tensor, kept: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = self.rounding.output(F.linear(self.rounding.input(x), SameGradient.apply(matrix, kept)))
        return out if bias is None else out + bias


def emulate_eight_bits(chunks: Iterable[Any], fp8: str, recipe: str) -> None:
    """Round in all linears of attention, MLPs and experts of the chunks by `fp8` and `fp8_recipe`."""
    rounding = Rounding(GRADIENTS[fp8], recipe)
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if is_emulated(f"{name}.weight"):
                module._forward_impl = EightBitProduct(module._forward_impl, rounding)
            elif is_emulated(f"{name}.w13"):
                module.eight_bits = {stack: EightBitStack(rounding) for stack in STACKED}


def kept_weights(chunks: Iterable[Any]) -> Iterator[KeptWeight]:
    """The emulated products of the chunks; none without emulation."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        for one in (vars(module).get("_forward_impl"), *(vars(module).get("eight_bits") or {}).values()):
            if isinstance(one, KeptWeight):
                yield one


def round_again(chunks: Iterable[Any]) -> None:
    """Let the next products of the chunks round their weights. At the beginning of a pass over micro-batches."""
    for one in kept_weights(chunks):
        one.is_stale = True


def token_multiple(chunks: Iterable[Any]) -> int:
    """Return the divisor of the tokens of a pass on every rank, for emulated products; 1 without any."""
    return max((FP8_RECIPES[one.rounding.recipe] for one in kept_weights(chunks)), default=1)


def eight_bit_bytes(chunks: Iterable[Any]) -> int:
    """Bytes of the rounded weights that the chunks keep."""
    return sum(one.weight.nbytes for one in kept_weights(chunks) if one.weight is not None)
