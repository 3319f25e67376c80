"""Pieces of prefixes that are met once: which they are, and attention that is the same with them and without."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.experience.prefix_tree import prefix_tree
from megatron_rl.model.attention import attend, bucketed
from megatron_rl.model.cascade_plan import SharedPiece, SlotPlan, cut_prefixes, shared_pieces
from megatron_rl.model.segments import Segments

ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=7)
"""Rows of so few different tokens that they branch often."""


def laid(rows: list[list[int]]) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """(lengths of segments, tokens before each, their columns) of rows in a trie."""
    sampled = torch.cat([torch.arange(len(row)) > 0 for row in rows])
    tree = prefix_tree(torch.tensor([token for row in rows for token in row]), sampled, torch.tensor([*map(len, rows)]))
    return list(tree.segments), tree.prefix_sizes, tree.prefix_columns


def test_three_rows_by_hand():
    """4 tokens, 2 after the first 3 of them, 1 after all these, 1 after the first. Would not catch a price."""
    lengths, counts = np.array([4, 2, 1, 1]), np.array([0, 3, 5, 1])
    before = np.array([0, 1, 2, 0, 1, 2, 4, 5, 0])
    assert shared_pieces(lengths, counts, before) == [
        SharedPiece((0, 1), (1, 8), 4),
        SharedPiece((1, 3), (3, 7), 3),
        SharedPiece((4, 6), (6, 7), 1),
    ]
    pieces, left = cut_prefixes(
        SlotPlan(lengths, *map(torch.from_numpy, (counts, before))), lambda piece: piece[0][0] > 0
    )
    assert [piece.keys for piece in pieces] == [(1, 3), (4, 6)]
    assert list(left.lengths) == [3, 1, 2, 1, 1]
    assert left.num_before.tolist() == [0, 1, 1, 1, 1] and left.before.tolist() == [0, 0, 0, 0]


def test_the_price_of_a_block():
    """A prompt of 300 tokens for 8 answers of 100 is worth one, of 20 for 4 of 30 it is not: measured either way.

    Would not catch a price in between.
    """
    assert SharedPiece((0, 300), (300, 1100), 8).is_worth_a_block
    assert not SharedPiece((0, 20), (20, 140), 4).is_worth_a_block


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, chosen=st.lists(st.booleans(), min_size=40, max_size=40))
def test_a_query_sees_every_token_before_it_once(rows, chosen):
    """In its slots or in a piece, whichever pieces are blocks. Would not catch slots that are laid wrong."""
    lengths, counts, before = laid(rows)
    choices = iter(chosen)
    pieces, left = cut_prefixes(SlotPlan(lengths, counts, before), lambda piece: next(choices))
    ends = torch.tensor(lengths).cumsum(0).tolist()
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    wanted = [
        [*prefix.tolist(), *range(start, column + 1)]
        for start, end, prefix in zip(starts, ends, before.split(counts.tolist()), strict=True)
        for column in range(start, end)
    ]
    found: list[list[int]] = []
    for length, prefix in zip(left.lengths, left.before.split(left.num_before.tolist()), strict=True):
        start = len(found)
        found += [[*prefix.tolist(), *range(start, start + place + 1)] for place in range(length)]
    for piece in pieces:
        for query in range(*piece.queries):
            found[query] += range(*piece.keys)
    assert [sorted(columns) for columns in found] == wanted


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, num_kv=st.sampled_from([1, 2, 4]), which=st.sampled_from([None, 0, 1]))
def test_attention_as_row_by_row(rows, num_kv, which):
    """Outputs and gradients within 1e-10 of whole rows, with all pieces as blocks, or every other one.

    Would not catch what float32 loses; the next test would.
    """
    lengths, counts, before = laid(rows)
    generator = torch.Generator().manual_seed(len(lengths))
    query, key, value = (
        torch.randn(sum(lengths), heads, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, num_kv, num_kv)
    )
    upstream = torch.randn(query.shape, generator=generator, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        worth = property(lambda piece: which is None or piece.keys[0] % 2 == which)
        patch.setattr(SharedPiece, "is_worth_a_block", worth)
        segments = Segments.on_host(lengths, (counts, before), with_pieces=True)
    together = bucketed(query, key, value, segments)
    ours = torch.autograd.grad((together * upstream).sum(), (query, key, value))
    alone, column = [], 0
    for length, prefix in zip(lengths, before.split(counts.tolist()), strict=True):
        columns = torch.cat([prefix, torch.arange(column, column + length)])
        alone.append(attend(*(x[None, columns] for x in (query, key, value)))[0, len(prefix) :])
        column += length
    whole = torch.cat(alone)
    expected = torch.autograd.grad((whole * upstream).sum(), (query, key, value))
    for mine, right in zip((together, *ours), (whole, *expected), strict=True):
        assert torch.allclose(mine, right, atol=1e-10)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_rounding(dtype, bound):
    """A prompt of 400 tokens for six answers against the same rows in slots, of an output of about 1.

    Would not catch an error that both have.
    """
    lengths, counts = [420, 30, 40, 50, 60, 70], torch.tensor([0, 400, 400, 400, 400, 400])
    before = torch.arange(400).repeat(5)
    generator = torch.Generator().manual_seed(5)
    leaves = [
        torch.randn(sum(lengths), heads, 16, generator=generator).to(dtype).requires_grad_() for heads in (4, 2, 2)
    ]
    found = []
    for with_pieces in (True, False):
        segments = Segments.on_host(lengths, (counts, before), with_pieces=with_pieces)
        assert bool(segments.pieces) == with_pieces
        out = bucketed(*leaves, segments)
        gradients = torch.autograd.grad((out * leaves[0].detach()).sum(), leaves)
        found.append([part.detach() for part in (out, *gradients)])
    for mine, other in zip(*found, strict=True):
        assert float((mine - other).abs().max()) < bound * float(other.abs().max())
