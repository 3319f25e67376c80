"""Attention within segments: the same numbers as one sequence at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.model.attention import attend, bucketed
from megatron_rl.model.segments import Segments, buckets

CPU = torch.device("cpu")


def test_lengths_in_buckets():
    """100 takes 80 but not 70; below 17 all go together. Would not catch a bucket that is too full."""
    assert buckets([70, 100, 80]) == [[1, 2], [0]]
    assert buckets([1, 16, 5]) == [[1, 2, 0]]


def test_segments_of_three_and_one():
    """Boundaries, positions and slots by hand. Would not catch an error that needs two buckets."""
    segments = Segments.of([1, 3], CPU)
    assert segments.cu_seqlens_q.tolist() == [0, 1, 4] and segments.max_seqlen_kv == 3
    assert segments.positions.tolist() == [0, 0, 1, 2]
    assert segments.shapes == ((2, 3),)
    assert segments.token_of_slot.tolist() == [1, 2, 3, 0, 0, 0]
    assert segments.slot_of_token.tolist() == [3, 0, 1, 2]


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.one_of(st.integers(1, 6), st.integers(30, 60)), min_size=1, max_size=6))
def test_as_one_sequence_at_a_time(lengths):
    """Outputs and gradients of grouped heads within 1e-10, in several buckets. Would not catch wrong positions."""
    generator = torch.Generator().manual_seed(len(lengths))
    query, key, value = (
        torch.randn(sum(lengths), heads, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    )
    upstream = torch.randn(query.shape, generator=generator, dtype=torch.float64)
    together = bucketed(query, key, value, Segments.of(lengths, CPU))
    ours = torch.autograd.grad((together * upstream).sum(), (query, key, value))
    parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    alone = torch.cat([attend(*(x[None] for x in part))[0] for part in parts])
    expected = torch.autograd.grad((alone * upstream).sum(), (query, key, value))
    assert torch.allclose(together, alone, atol=1e-10)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-10)


def test_a_segment_with_a_prefix():
    """Three tokens, of which the last segment's one comes after the first two; by hand. Would not catch gradients."""
    segments = Segments.of([3, 1], CPU, [(0, 0), (0, 2)])
    assert segments.positions.tolist() == [0, 1, 2, 2] and segments.max_seqlen_q == 3
    assert segments.shapes == ((2, 3),) and segments.token_of_slot.tolist() == [0, 1, 2, 0, 1, 3]
    assert segments.slot_of_token.tolist() == [0, 1, 2, 5]
    assert segments.prefix_slots.tolist() == [3, 4] and segments.prefix_tokens.tolist() == [0, 1]


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.integers(1, 40),
    answers=st.lists(st.one_of(st.integers(1, 6), st.integers(30, 60)), min_size=1, max_size=5),
    other=st.integers(1, 5),
)
def test_a_prefix_is_as_if_it_lay_before_every_segment(prompt, answers, other):
    """Outputs, and gradients added up over the copies, within 1e-10. Would not catch wrong positions."""
    generator = torch.Generator().manual_seed(prompt)
    lengths = [other, prompt + answers[0], *answers[1:]]
    prefixes = [(0, 0), (0, 0), *[(other, prompt)] * (len(answers) - 1)]
    query, key, value = (
        torch.randn(sum(lengths), heads, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    )
    upstream = torch.randn(query.shape, generator=generator, dtype=torch.float64)
    together = bucketed(query, key, value, Segments.of(lengths, CPU, prefixes))
    ours = torch.autograd.grad((together * upstream).sum(), (query, key, value))
    alone, column = [], 0
    for length, (first, shared) in zip(lengths, prefixes, strict=True):
        whole = (torch.cat([x[first : first + shared], x[column : column + length]]) for x in (query, key, value))
        alone.append(attend(*(x[None] for x in whole))[0, shared:])
        column += length
    expected = torch.autograd.grad((torch.cat(alone) * upstream).sum(), (query, key, value))
    assert torch.allclose(together, torch.cat(alone), atol=1e-10)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-10)


@pytest.mark.parametrize("heads", [4, 2])
def test_no_token_sees_another_segment(heads):
    """A changed token changes its own segment from there on, and nothing else. Would not catch wrong numbers."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(9, n, 8, generator=generator) for n in (4, heads, heads))
    segments = Segments.of([4, 5], CPU)
    before = bucketed(query, key, value, segments)
    value[6] += 1
    changed = (bucketed(query, key, value, segments) - before).abs().sum((1, 2)) > 0
    assert changed.nonzero().flatten().tolist() == [6, 7, 8]
