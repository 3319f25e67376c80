"""Rectangles of a trie, whole and cut over context-parallel ranks: every query sees every token before it once."""

from itertools import accumulate, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cascade_plan import ROWS, laid

from megatron_rl.model.attention import bucketed
from megatron_rl.model.block_attention import PLAIN, AttentionKind
from megatron_rl.model.context_segments import ContextSegments, TrieSegments
from megatron_rl.model.joined_attention import Merged
from megatron_rl.model.rectangles import Rectangle, levels_of, part_of
from megatron_rl.model.segments import Segments
from megatron_rl.parallel.zigzag import chunk_ranges, zigzag_columns
from megatron_rl.planning.time import share_read

CPU = torch.device("cpu")


def test_a_node_over_two_ranks_by_hand():
    """Eight tokens of one node, of which rank 0 has 0, 1, 6 and 7. Would not catch pieces."""
    whole = [Rectangle((0, 8), (0, 8), causal=True)]
    mine, others = chunk_ranges(8, 2, 0), chunk_ranges(8, 2, 1)
    assert part_of(whole, mine, mine) == [
        Rectangle((0, 2), (0, 2), causal=True),
        Rectangle((2, 4), (0, 2), causal=False, ahead=6),
        Rectangle((2, 4), (2, 4), causal=True),
    ]
    assert part_of(whole, mine, others) == [
        Rectangle((2, 4), (0, 2), causal=False, ahead=4),
        Rectangle((2, 4), (2, 4), causal=False, ahead=2),
    ]


def filled(rows: list[list[int]], size: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """`laid`, with a segment of filler up to a multiple of two chunks for every rank."""
    lengths, counts, before = laid(rows)
    filler = -sum(lengths) % (2 * size)
    return [*lengths, *[filler] * bool(filler)], counts, before


def seen_by(rectangle: Rectangle, window: int | None) -> list[tuple[int, list[int]]]:
    """(query, the keys of a rectangle that it sees) of each of its queries."""
    queries, keys, causal, ahead = rectangle
    found = []
    for place, query in enumerate(range(*queries)):
        first = 0 if window is None else max(0, place + ahead - window + 1)
        found.append((query, list(range(*keys))[first : place + 1 if causal else None]))
    return found


def assert_nothing_lies_outside(rectangles: list[Rectangle], window: int) -> None:
    """Every query of a rectangle sees a key of it, and every key is seen."""
    for rectangle in rectangles:
        seen = seen_by(rectangle, window)
        assert all(keys for _, keys in seen) and {key for _, keys in seen for key in keys} == {*range(*rectangle.keys)}


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, size=st.sampled_from([1, 2, 3]), window=st.none() | st.integers(1, 12))
def test_ranks_together_see_every_token_before_a_query_once(rows, size, window):
    """Or those within a window, in levels of which no two rectangles share a query. Would not catch a kernel that takes
    another order.
    """
    lengths, counts, before = filled(rows, size)
    num_columns = sum(lengths)
    columns = [
        [column for span in chunk_ranges(num_columns, size, rank) for column in range(*span)] for rank in range(size)
    ]
    found = [[] for _ in range(num_columns)]
    segments = TrieSegments.share_of(lengths, (counts, before), 0, size)
    for rank, source in product(range(size), repeat=2):
        levels = levels_of(segments.rectangles(rank, source, window))
        for level in levels:
            queries = [query for rectangle in level for query in range(*rectangle.queries)]
            assert len(set(queries)) == len(queries) and len({rectangle.causal for rectangle in level}) == 1
            for query, keys in (seen for rectangle in level for seen in seen_by(rectangle, window)):
                found[columns[rank][query]] += [columns[source][key] for key in keys]
            if window is not None:
                assert_nothing_lies_outside(level, window)
    padded = [*counts.tolist(), *[0] * (len(lengths) - len(counts))]
    wanted, start = [], 0
    for length, prefix in zip(lengths, before.split(padded), strict=True):
        whole = [[*prefix.tolist(), *range(start, start + place + 1)] for place in range(length)]
        wanted += [path[-window:] if window else path for path in whole]
        start += length
    assert [sorted(seen) for seen in found] == wanted


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    size=st.sampled_from([2, 3, 4]),
    window=st.none() | st.integers(1, 40),
)
def test_ranks_see_every_token_of_a_segment_once(lengths, size, window):
    """Or those within a window; what a rank reads of another is what its queries see. Would not catch two wrong cuts
    that are alike, of tokens and of rectangles.
    """
    lengths = tuple(2 * size * length for length in lengths)
    columns = [zigzag_columns(lengths, size, rank).tolist() for rank in range(size)]
    segments = ContextSegments(lengths=lengths, size=size)
    found = [[] for _ in range(sum(lengths))]
    num_read = 0
    for rank, source in product(range(size), repeat=2):
        rectangles = segments.rectangles(rank, source, window)
        keys = set()
        for query, seen in (seen for rectangle in rectangles for seen in seen_by(rectangle, window)):
            found[columns[rank][query]] += [columns[source][key] for key in seen]
            keys |= {*seen}
        assert segments.read(rank, source, CPU, window).tolist() == sorted(keys)
        num_read += len(keys) * (rank != source)
        if window is not None:
            assert_nothing_lies_outside(rectangles, window)
    if window is not None:
        planned = sum(length * (size - 1) * share_read(length, size, window) for length in lengths)
        assert planned == pytest.approx(num_read)
    starts = [start for start, length in zip(accumulate((0, *lengths)), lengths, strict=False) for _ in range(length)]
    wanted = [[*range(max(start, query - (window or query + 1) + 1), query + 1)] for query, start in enumerate(starts)]
    assert [sorted(seen) for seen in found] == wanted


def test_what_a_rank_reads_within_a_window_by_hand():
    """32 tokens over 4 ranks, in chunks of 4: with a window of 3, two tokens of the chunk before one are read, which
    only neighbours have. Would not catch what is sent.
    """
    segments = ContextSegments(lengths=(32,), size=4)
    read = [[segments.read(rank, source, CPU, 3).tolist() for source in range(4)] for rank in range(4)]
    own = [*range(8)]
    assert read == [[own, [6, 7], [], []], [[2, 3], own, [6, 7], []], [[], [2, 3], own, [6, 7]], [[], [], [2, 3], own]]


@pytest.mark.parametrize("kind", [PLAIN, AttentionKind(1.5), AttentionKind(None, 4)])
@pytest.mark.parametrize("size", [1, 2])
def test_blocks_add_up_to_attention_in_slots(size, kind):
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
    expected = bucketed(*leaves, Segments.on_host(lengths, (counts, before)), kind)
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
            for facing, queries, keys in segments.blocks(rank, source, CPU, kind.window)
        ]
        for facing, queries, keys, here in blocks:
            merged.add(*facing.forward(query[queries], key[keys], value[keys], kind), here)
        out[mine] = merged.out
        for facing, queries, keys, here in blocks:
            sums = (merged.out[here], merged.log_sum[here])
            found = facing.backward(grad[queries], query[queries], key[keys], value[keys], *sums, kind)
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
    assert sorted(sorted(found.index(tuple(one)[:3]) for one in level) for level in levels) == [[0, 1], [2, 3], [4]]
