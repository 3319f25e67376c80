"""Two calls for all experts against one expert after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.model.biased_experts import OwnBias, biased_one_by_one, grouped_biased
from megatron_rl.model.experts import fits_grouped_mm, grouped, one_by_one, plain_linears


def case(counts: list[int], hidden: int, columns: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Tokens [T, H], weights [T], w13 [E, 2F, H] and w2 [E, H, F], as leaves."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens, num_experts = sum(counts), len(counts)
    shapes = [(num_tokens, hidden), (num_tokens,), (num_experts, 2 * columns, hidden), (num_experts, hidden, columns)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def run(function, counts: list[int], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """The output and the gradients of all leaves, in float64."""
    tokens, weights, w13, w2 = leaves
    out = function(tokens, torch.tensor(counts), weights, w13, w2)
    gradients = torch.autograd.grad(out, leaves, grad_outputs=torch.cos(out.detach()))
    return out.detach().double(), *(gradient.double() for gradient in gradients)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    hidden=st.sampled_from([8, 16, 48]),
    columns=st.sampled_from([8, 24]),
    seed=st.integers(0, 99),
)
def test_outputs_and_gradients_are_those_of_single_experts(counts, hidden, columns, seed):
    """In bfloat16, also where experts get no token; both are compared with float64.

    Would not catch a kernel of CUDA that rounds otherwise.
    """
    leaves = case(counts, hidden, columns, seed, torch.bfloat16)
    assert fits_grouped_mm(leaves[0], leaves[2], leaves[3])
    exact = run(one_by_one, counts, [leaf.detach().double().requires_grad_() for leaf in leaves])
    for found, alone, true in zip(run(grouped, counts, leaves), run(one_by_one, counts, leaves), exact, strict=True):
        scale = true.abs().max().clamp(min=1.0)
        assert (found - true).abs().max() <= 2 * (alone - true).abs().max() + 0.01 * scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_bias_has_the_gradient_of_its_tokens(dtype):
    """As of an index, bit for bit where nothing is rounded; one expert has no token, one 4000. In bfloat16 a sum of
    4000 differs from float64 by one rounding. Would not catch the time that CUDA takes.
    """
    owner = torch.repeat_interleave(torch.tensor([3, 0, 4000, 1]))
    grad = torch.randint(-4, 5, (len(owner), 6), generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(4, 6, dtype=dtype, requires_grad=True)
    (found,) = torch.autograd.grad(OwnBias.apply(bias, owner), bias, grad)
    exact = torch.zeros(4, 6, dtype=torch.float64).index_add_(0, owner, grad.double())
    assert torch.equal(OwnBias.apply(bias, owner), bias[owner]) and torch.equal(found, exact.to(dtype))


def test_experts_with_biases_are_those_of_single_experts():
    """Output and gradients in bfloat16 beside float64; the second expert has no token, and no gate reaches its
    bound. Would not catch a rounding of CUDA's.
    """
    counts, generator = torch.tensor([5, 0, 700]), torch.Generator().manual_seed(3)
    shapes = ((705, 16), (3, 32, 16), (3, 16, 16), (3, 32), (3, 16))
    leaves = [(0.2 * torch.randn(shape, generator=generator)).bfloat16().requires_grad_() for shape in shapes]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    tokens, w13, w2, *biases = wide
    exact = biased_one_by_one(tokens, counts, plain_linears(w13), plain_linears(w2), *biases)
    found = grouped_biased(leaves[0], counts, *leaves[1:])
    pairs = [(found, exact)]
    pairs += zip(
        *(torch.autograd.grad(out, given, torch.ones_like(out)) for out, given in ((found, leaves), (exact, wide))),
        strict=True,
    )
    for one, other in pairs:
        assert (one.double() - other).abs().max() <= 0.02 * other.abs().max()


@pytest.mark.parametrize(
    ("counts", "hidden", "columns", "dtype"),
    [
        ([3, 2], 16, 16, torch.float32),
        ([3, 2], 16, 16, torch.float16),
        ([3, 2], 12, 16, torch.bfloat16),
        ([3, 2], 16, 12, torch.bfloat16),
        ([0, 0], 16, 16, torch.bfloat16),
    ],
    ids=["float32", "float16", "a short row", "a short column", "no token"],
)
def test_what_is_left_to_single_experts(counts, hidden, columns, dtype):
    """Would not catch a shape that torch refuses for another reason."""
    tokens, _, w13, w2 = case(counts, hidden, columns, 0, dtype)
    assert not fits_grouped_mm(tokens, w13, w2)
