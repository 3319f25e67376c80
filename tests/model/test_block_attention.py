"""Softmax over all keys from blocks of them: by hand, and against float64; and all ranks' blocks without processes."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_rl.model import block_attention
from megatron_rl.model.block_attention import (
    PLAIN,
    Facing,
    Pieces,
    cuda_flash_backward,
    cuda_flash_forward,
    flash_rows_backward,
    flash_rows_forward,
    products_backward,
    products_forward,
)
from megatron_rl.model.context_segments import ContextSegments
from megatron_rl.model.joined_attention import Merged, taken
from megatron_rl.parallel.zigzag import zigzag_columns

CPU = torch.device("cpu")


def exact(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Causal attention within segments of these lengths, in float64: [T, N, D], [T, K, D] twice -> [T, N, D]."""
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (query, *(x.repeat_interleave(groups, 1) for x in (key, value))))
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    later = torch.ones(sum(lengths), sum(lengths), dtype=torch.bool).triu(1)
    hidden = later | (segment[:, None] != segment[None])
    scores = (q @ k.transpose(1, 2) / math.sqrt(query.shape[-1])).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def drawn(num_tokens: int, num_heads: int, num_kv: int, seed: int = 0) -> list[Tensor]:
    """Query, key, value, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_tokens, n, 8, generator=generator) for n in (num_heads, num_kv, num_kv, num_heads)]


def test_two_blocks_by_hand():
    """Scores ln 1, ln 2, ln 3 weigh 6, 12, 18 with 1/6, 2/6, 3/6: 14. Blocks of two and one: 10 and 18, both ln 3.

    Would not catch an error of more than one head.
    """
    query = torch.ones(1, 1, 1)
    key, value = torch.tensor([1.0, 2.0, 3.0]).log()[:, None, None], torch.tensor([6.0, 12.0, 18.0])[:, None, None]
    merged = Merged(query)
    for block, out in ((slice(0, 2), 10.0), (slice(2, 3), 18.0)):
        facing = Facing(Pieces((1,), CPU), Pieces((len(key[block]),), CPU), causal=False)
        found, log_sum = products_forward(query, key[block], value[block], facing, PLAIN)
        assert found.item() == pytest.approx(out, rel=1e-6) and log_sum.item() == pytest.approx(math.log(3), rel=1e-6)
        merged.add(found, log_sum)
    assert merged.out.item() == pytest.approx(14.0, rel=1e-6)
    assert merged.log_sum.item() == pytest.approx(math.log(6), rel=1e-6)


def test_blocks_far_apart():
    """Scores of 1000 and -1000 neither overflow nor lose the larger. Would not catch lost digits in between."""
    query, far = torch.ones(1, 1, 1), Facing(Pieces((1,), CPU), Pieces((1,), CPU), causal=False)
    for order in ((1000.0, -1000.0), (-1000.0, 1000.0)):
        merged = Merged(query)
        for score in order:
            merged.add(*products_forward(query, torch.full((1, 1, 1), score), torch.full((1, 1, 1), score), far, PLAIN))
        assert merged.out.item() == 1000.0 and merged.log_sum.item() == 1000.0


@pytest.mark.parametrize("tile", [1, 200, 1 << 16, None])
@pytest.mark.parametrize("num_kv", [1, 2, 4])
def test_one_block_equals_float64(tile, num_kv, monkeypatch):
    """Causal, segments of several lengths, shared keys, by products in tiles of any size and by torch's kernel (None);
    gradients too. Would not catch filler.
    """
    monkeypatch.setattr(block_attention, "LARGEST_TILE", tile)
    by_products = (partial(products_forward, kind=PLAIN), partial(products_backward, kind=PLAIN))
    forward, backward = (flash_rows_forward, flash_rows_backward) if tile is None else by_products
    lengths = [6, 3, 6, 1]
    query, key, value, grad = drawn(sum(lengths), 4, num_kv)
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    expected = exact(*leaves, lengths)
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    pieces = Pieces(tuple(lengths), CPU)
    facing = Facing(pieces, pieces, causal=True)
    out, log_sum = forward(query, key, value, facing=facing)
    assert (out - expected).abs().max() < 1e-5
    for found, right in zip(backward(grad, query, key, value, out, log_sum, facing=facing), wanted, strict=True):
        assert (found - right).abs().max() < 1e-5


@pytest.mark.parametrize(("size", "num_rows"), [(2, 1), (3, 1), (4, 2)])
def test_all_ranks_blocks_add_up(size, num_rows):
    """Every rank with the blocks of all: outputs and gradients of whole attention. Would not catch what travels wrong;
    `test_context_attention.py` does.
    """
    row = (4 * size, 2 * size, 2 * size) if num_rows == 1 else (4 * size,)
    lengths = row * num_rows
    query, key, value, grad = drawn(sum(lengths), 4, 2)
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    expected = exact(*leaves, list(lengths))
    wanted = torch.autograd.grad(expected, leaves, grad.double())
    tokens = [zigzag_columns(lengths, size, rank) for rank in range(size)]
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    for rank in range(size):
        segments = ContextSegments.cut(row, num_rows, zigzag_columns(row, size, rank), size)
        assert segments.order.tolist() == torch.cat(tokens).tolist() and segments.lengths == lengths
        q, merged, faced = query[tokens[rank]], Merged(query[tokens[rank]]), []
        for source in range(size):
            [(facing, queries, keys)] = segments.blocks(rank, source, query.device)
            pair = [taken(x[tokens[source]], keys) for x in (key, value)]
            merged.add(*facing.forward(taken(q, queries), *pair, PLAIN), queries)
            faced.append((facing, queries, taken(tokens[source], keys), pair))
        assert (merged.out - expected[tokens[rank]]).abs().max() < 1e-5
        for facing, queries, of_keys, pair in faced:
            mine = [taken(x, queries) for x in (grad[tokens[rank]], q, merged.out, merged.log_sum)]
            found = facing.backward(mine[0], mine[1], *pair, *mine[2:], PLAIN)
            for total, of, part in zip(grads, (taken(tokens[rank], queries), of_keys, of_keys), found, strict=True):
                total.index_add_(0, of, part)
    for found, right in zip(grads, wanted, strict=True):
        assert (found - right).abs().max() < 1e-5


@pytest.mark.parametrize("num_kv", [2, 4])
def test_flash_kernels_are_called_as_torch_has_them(num_kv):
    """On the meta device, which checks arguments and shapes of the kernels that only CUDA runs.

    Would not catch a wrong number; nothing here computes one.
    """
    shapes = [(12, 4, 16), (20, num_kv, 16), (20, num_kv, 16), (12, 4, 16)]
    query, key, value, grad = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    facing = Facing(Pieces((4, 8), torch.device("meta")), Pieces((8, 12), torch.device("meta")), causal=False)
    out, log_sum = cuda_flash_forward(query, key, value, facing)
    assert out.shape == (12, 4, 16) and log_sum.shape == (12, 4) and log_sum.dtype == torch.float32
    grads = cuda_flash_backward(grad, query, key, value, out.float(), log_sum, facing)
    assert [tuple(x.shape) for x in grads] == [(12, 4, 16), (20, num_kv, 16), (20, num_kv, 16)]
