"""Rectangles of a trie, whole and cut over context-parallel ranks: every query sees every token before it once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cascade_plan import ROWS, laid

from megatron_rl.model.attention import bucketed
from megatron_rl.model.block_attention import Merged, block_backward, block_forward
from megatron_rl.model.segments import Segments
from megatron_rl.model.trie_segments import Rectangle, TrieSegments, levels_of, part_of
from megatron_rl.parallel.zigzag import chunk_ranges

CPU = torch.device("cpu")


def test_a_node_over_two_ranks_by_hand():
    """Eight tokens of one node, of which rank 0 has 0, 1, 6 and 7. Would not catch pieces."""
    whole = [Rectangle((0, 8), (0, 8), causal=True)]
    mine, others = chunk_ranges(8, 2, 0), chunk_ranges(8, 2, 1)
    assert part_of(whole, mine, mine) == [
        Rectangle((0, 2), (0, 2), causal=True),
        Rectangle((2, 4), (0, 2), causal=False),
        Rectangle((2, 4), (2, 4), causal=True),
    ]
    assert part_of(whole, mine, others) == [
        Rectangle((2, 4), (0, 2), causal=False),
        Rectangle((2, 4), (2, 4), causal=False),
    ]


def filled(rows: list[list[int]], size: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """`laid`, with a segment of filler up to a multiple of two chunks for every rank."""
    lengths, counts, before = laid(rows)
    filler = -sum(lengths) % (2 * size)
    return [*lengths, *[filler] * bool(filler)], counts, before


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, size=st.sampled_from([1, 2, 3]))
def test_ranks_together_see_every_token_before_a_query_once(rows, size):
    """In levels of which no two rectangles share a query. Would not catch a kernel that takes another order."""
    lengths, counts, before = filled(rows, size)
    num_columns = sum(lengths)
    columns = [
        [column for span in chunk_ranges(num_columns, size, rank) for column in range(*span)] for rank in range(size)
    ]
    found = [[] for _ in range(num_columns)]
    for rank in range(size):
        segments = TrieSegments.share_of(lengths, (counts, before), rank, size)
        for source, levels in enumerate(segments.levels):
            for level in levels:
                taken = [query for rectangle in level for query in range(*rectangle.queries)]
                assert len(set(taken)) == len(taken) and len({rectangle.causal for rectangle in level}) == 1
                for queries, keys, causal in level:
                    for place, query in enumerate(range(*queries)):
                        seen = range(*keys)[: place + 1] if causal else range(*keys)
                        found[columns[rank][query]] += [columns[source][key] for key in seen]
    padded = [*counts.tolist(), *[0] * (len(lengths) - len(counts))]
    wanted, start = [], 0
    for length, prefix in zip(lengths, before.split(padded), strict=True):
        wanted += [[*prefix.tolist(), *range(start, start + place + 1)] for place in range(length)]
        start += length
    assert [sorted(seen) for seen in found] == wanted


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_add_up_to_attention_in_slots(size):
    """Outputs and gradients of all ranks' blocks, within 1e-5; keys of one block may come twice in a level.

    Would not catch what travels wrong between ranks; `test_tree_training.py` does.
    """
    generator = torch.Generator().manual_seed(3)
    trunk = torch.randint(0, 9, (40,), generator=generator).tolist()
    lengths, counts, before = filled([[*trunk[:n], 9, n] for n in (40, 30, 30, 20, 12, 5)] + [[3] * 7, trunk], size)
    num_columns = sum(lengths)
    heads = (4, 2, 2, 4)
    *leaves, grad = (torch.randn(num_columns, n, 8, generator=generator) for n in heads)
    for leaf in leaves:
        leaf.requires_grad_()
    expected = bucketed(*leaves, Segments.on_host(lengths, (counts, before)))
    wanted = [expected.detach(), *torch.autograd.grad(expected, leaves, grad)]
    query, key, value = (leaf.detach() for leaf in leaves)
    out, totals = torch.empty_like(query), [torch.zeros_like(x) for x in (query, key, value)]
    spans = [chunk_ranges(num_columns, size, rank) for rank in range(size)]
    columns = [torch.cat([torch.arange(*span) for span in of]) for of in spans]
    for rank, mine in enumerate(columns):
        segments, merged = TrieSegments.share_of(lengths, (counts, before), rank, size), Merged(query[mine])
        blocks = [
            (facing, mine[queries], theirs[keys], queries)
            for source, theirs in enumerate(columns)
            for facing, queries, keys in segments.blocks(rank, source, CPU)
        ]
        for facing, queries, keys, here in blocks:
            merged.add(*block_forward(query[queries], key[keys], value[keys], facing), here)
        out[mine] = merged.out
        for facing, queries, keys, here in blocks:
            sums = (merged.out[here], merged.log_sum[here])
            found = block_backward(grad[queries], query[queries], key[keys], value[keys], *sums, facing)
            for total, of, part in zip(totals, (queries, keys, keys), found, strict=True):
                total.index_add_(0, of, part)
    for mine, right in zip((out, *totals), wanted, strict=True):
        assert float((mine - right).abs().max()) < 1e-5 * float(right.abs().max())


def test_levels_are_few():
    """Neighbours share one, a rectangle within another does not, and causal ones have their own.

    Would not catch an order of levels, which does not matter.
    """
    found = [((0, 4), (0, 4), True), ((4, 6), (4, 6), True), ((2, 6), (0, 2), False), ((6, 8), (0, 1), False)]
    found.append(((4, 6), (2, 4), False))
    levels = levels_of([Rectangle(*one) for one in found])
    assert sorted(sorted(found.index(tuple(one)) for one in level) for level in levels) == [[0, 1], [2, 3], [4]]
