"""Rounding to 8 bits, by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from megatron_rl.model.eight_bits import (
    E4M3,
    E5M2,
    EightBitProduct,
    EightBitStack,
    RoundedGradient,
    Rounding,
    SameGradient,
    rounded,
)
from megatron_rl.model.families import is_emulated


def test_one_scale_for_a_tensor() -> None:
    """e4m3 has 448 at most and three bits behind the first: between 16 and 32 it goes by 2, between 1/4 and 1/2 by
    1/32. A maximum of 896 doubles all of it.
    """
    x = torch.tensor([[448.0, 17.3, 0.3, -1.0]])
    assert rounded(x, E4M3, None).tolist() == [[448.0, 18.0, 0.3125, -1.0]]
    assert rounded(2 * x, E4M3, None).tolist() == [[896.0, 36.0, 0.625, -2.0]]


def test_gradients_have_less_precision_and_more_range() -> None:
    """e5m2 goes by 1/8 between 1/2 and 1; its smallest number is 2^-16, below e4m3's 2^-9."""
    x = torch.tensor([[57344.0, 0.8, 2.0**-16]])
    assert rounded(x, E5M2, None).tolist() == [[57344.0, 0.75, 2.0**-16]]
    assert rounded(torch.tensor([[448.0, 2.0**-16]]), E4M3, None).tolist() == [[448.0, 0.0]]


def test_tiles_have_scales_of_their_own_which_are_powers_of_two() -> None:
    """128 elements of a token beside another 128, 2^-12 as large: rounded alike. A maximum of 449 is scaled by 2, where
    448 is not: it becomes 448, and the smallest number is twice as large.
    """
    generator = torch.Generator().manual_seed(1)
    first = torch.rand(3, 128, generator=generator)
    both = rounded(torch.cat([first, first * 2.0**-12], dim=1), E4M3, (1, 128))
    assert torch.equal(both[:, 128:], both[:, :128] * 2.0**-12)
    assert torch.equal(both[:, :128], rounded(first, E4M3, (1, 128)))
    assert (both[:, :128] - first).abs().max() < first.max() / 16
    x = torch.zeros(1, 130)
    x[0, :3], x[0, 128:] = torch.tensor([449.0, 17.3, 1.0]), torch.tensor([448.0, 17.3])
    assert rounded(x, E4M3, (1, 128))[0, [0, 1, 2, 128, 129]].tolist() == [448.0, 18.0, 1.0, 448.0, 18.0]
    x[0, 2] = 0.0195  # 2^-9 is the smallest number: at a scale of 2 it is 2^-8
    assert rounded(x, E4M3, (1, 128))[0, 2] == 5 * 2.0**-8


def test_a_tile_of_a_weight_has_rows_and_columns() -> None:
    """A row of the next tile does not change the scale; zeros stay. Shapes and dtypes stay, in uneven tiles too."""
    weight = torch.zeros(130, 3, dtype=torch.bfloat16)
    weight[0, 0], weight[1, 1], weight[129, 2] = 1.0, 0.3, 4096.0
    out = rounded(weight, E4M3, (128, 128))
    assert out.shape == weight.shape and out.dtype == torch.bfloat16
    # The largest of the first tile is 1, scaled by 2^8: 0.3 * 256 = 76.8 goes by 8.
    assert out[1, 1] == 80 / 256 and out[129, 2] == 4096 and out.count_nonzero() == 3


def test_rounding_hands_gradients_on() -> None:
    """A factor's gradient is that of the product; what comes back through a product is rounded once."""
    x = torch.tensor([[1.0, 17.3]], requires_grad=True)
    out = RoundedGradient.apply(SameGradient.apply(x, rounded(x.detach(), E4M3, None)), E5M2, None)
    assert out.tolist() == rounded(x.detach(), E4M3, None).tolist()
    out.backward(torch.tensor([[57344.0, 0.8]]))
    assert x.grad is not None and x.grad.tolist() == [[57344.0, 0.75]]


def by_hand(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """x [R, C] as e4m3 holds it, tile by tile."""
    out = torch.empty_like(x)
    for row in range(0, x.shape[0], rows):
        for column in range(0, x.shape[1], columns):
            tile = x[row : row + rows, column : column + columns]
            scale = 2.0 ** math.ceil(math.log2(tile.abs().max().item() / 448))
            out[row : row + rows, column : column + columns] = (tile / scale).to(E4M3).float() * scale
    return out


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_each_expert_has_scales_of_its_own(recipe: str) -> None:
    """Products and gradients of three experts, one without tokens, against a loop: a matrix beside another that is a
    thousand times as large is rounded as alone. The gradient of x goes through the rounded matrix.
    """
    generator = torch.Generator().manual_seed(2)
    sizes = torch.tensor([1.0, 1000.0, 1.0])[:, None, None]
    stack = (torch.randn(3, 40, 130, generator=generator) * sizes).requires_grad_()
    tokens = [torch.randn(count, 130, generator=generator).requires_grad_() for count in (5, 0, 3)]
    grads = [torch.randn(len(x), 40, generator=generator) for x in tokens]
    kept = EightBitStack(Rounding(E4M3, recipe))
    outputs = [product(x) for product, x in zip(kept.linears(stack), tokens, strict=True)]
    found = torch.autograd.grad(outputs, [stack, *tokens], grads)
    for number, (x, grad) in enumerate(zip(tokens, grads, strict=True)):
        if not len(x):
            assert not found[0][number].any()
            continue
        plain, matrix = x.detach(), stack.detach()[number]
        if recipe == "blockwise":
            x_8, w_8, grad_8 = by_hand(plain, 1, 128), by_hand(matrix, 128, 128), by_hand(grad, 1, 128)
        else:
            x_8, w_8, grad_8 = (rounded(each, E4M3, None) for each in (plain, matrix, grad))
        torch.testing.assert_close(outputs[number], x_8 @ w_8.T)
        torch.testing.assert_close(found[0][number], grad_8.T @ x_8)
        torch.testing.assert_close(found[1 + number], grad_8 @ w_8)


def test_a_pass_reads_one_rounded_weight() -> None:
    """A weight that changes within a pass is not seen until the next: a recomputed product is the first one again."""
    weight = torch.nn.Parameter(torch.tensor([[448.0, 17.3]]))
    product = EightBitProduct(F.linear, Rounding(E5M2, "tensorwise"))
    x = torch.ones(16, 2)
    first = product(input=x, weight=weight)
    with torch.no_grad():
        weight[0, 0] = 224.0
    assert first[0].item() == 448.0 + 18.0 and torch.equal(product(input=x, weight=weight), first)
    product.is_stale = True
    # Half the scale: 34.6 goes by 4 to 36, half of it.
    assert product(input=x, weight=weight)[0].item() == 224.0 + 18.0
    frozen = product(input=x, weight=weight.detach())
    assert not frozen.requires_grad


def test_what_is_emulated() -> None:
    """By hand, of names of every kind of layer."""
    layer = "decoder.layers.0."
    rounds = ["self_attention.linear_down.weight", "self_attention.linear_qkvz.weight", "mlp.experts.w2"]
    rounds += ["mlp.shared_experts.linear_fc1.weight", "self_attention.linear_proj.weight"]
    others = ["self_attention.linear_ba.weight", "mlp.router.weight", "mlp.experts.w13_bias", "input_layernorm.weight"]
    others += ["self_attention.linear_proj.bias", "mlp.shared_experts.gate_weight"]
    assert all(is_emulated(layer + name) for name in rounds) and not any(is_emulated(layer + name) for name in others)
    assert not is_emulated("output_layer.weight") and not is_emulated("embedding.word_embeddings.weight")
