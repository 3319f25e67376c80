"""Which tokens a context-parallel rank reads: by hand, every token once, even work."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.parallel.zigzag import ContextShare, segment_multiple, zigzag_columns

modest = settings(max_examples=60, deadline=None)


@st.composite
def cuts(draw) -> tuple[int, list[int]]:
    cp_size = draw(st.integers(2, 5))
    chunks = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return cp_size, [2 * cp_size * chunk for chunk in chunks]


def test_two_segments_on_two_ranks():
    """8 and 4 tokens, chunks of 2 and of 1. Would not catch what only three ranks show."""
    assert zigzag_columns([8, 4], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag_columns([8, 4], 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert segment_multiple(2) == 4 and segment_multiple(1) == 1


def test_uneven_segments_are_refused():
    """Would not catch a cut of a segment that has the right length and lies in the wrong place."""
    with pytest.raises(ValueError, match=r"segments of \[6\] tokens are no multiple of 2 \* cp\(2\)"):
        zigzag_columns([8, 6], 2, 0)


@modest
@given(cut=cuts())
def test_every_token_is_read_once(cut):
    """And every rank has as many. Would not catch which rank reads which; the hand-made case does."""
    cp_size, lengths = cut
    ranks = [zigzag_columns(lengths, cp_size, rank) for rank in range(cp_size)]
    assert {len(columns) for columns in ranks} == {sum(lengths) // cp_size}
    assert torch.cat(ranks).sort().values.tolist() == list(range(sum(lengths)))


@modest
@given(cut=cuts())
def test_attention_is_the_same_work_for_every_rank(cut):
    """Exactly, filler included: a token costs those up to it. Would not catch uneven work of one step of a ring."""
    cp_size, lengths = cut
    costs = torch.cat([torch.arange(1, length + 1) for length in lengths])
    assert len({int(costs[zigzag_columns(lengths, cp_size, rank)].sum()) for rank in range(cp_size)}) == 1


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_work_is_even_on_answers_of_two_kinds(cp_size):
    """Real tokens only, within 5% of the mean: 48 answers of 50 to 300 tokens, 16 of 2000 to 4000; filled up, packed.

    Would not catch uneven linears: every rank has as many tokens.
    """
    draw = random.Random(0)
    real = [draw.randint(50, 300) for _ in range(48)] + [draw.randint(2000, 4000) for _ in range(16)]
    draw.shuffle(real)
    padded = [-(-length // (2 * cp_size)) * 2 * cp_size for length in real]
    costs = torch.zeros(sum(padded), dtype=torch.int64)
    start = 0
    for length, room in zip(real, padded, strict=True):
        costs[start : start + length] = torch.arange(1, length + 1)
        start += room
    work = torch.tensor([int(costs[zigzag_columns(padded, cp_size, rank)].sum()) for rank in range(cp_size)])
    assert (work / work.double().mean() - 1).abs().max() < 0.05


@modest
@given(cut=cuts(), num_rows=st.integers(1, 3), seed=st.integers(0, 99))
def test_scored_tokens_are_put_together_in_order(cut, num_rows, seed):
    """Each response token is predicted on one rank, and its number is its place in the whole block.

    Padded rows and packed ones. Would not catch an error of the sum over ranks; `tests/parity` does.
    """
    cp_size, lengths = cut
    width = sum(lengths)
    predicts = torch.rand(num_rows, width - 1, generator=torch.Generator().manual_seed(seed)) < 0.5
    output = torch.arange(num_rows * width).view(num_rows, width)
    expected = output[:, :-1][predicts]
    found = torch.full_like(expected, -1)
    for rank in range(cp_size):
        columns = zigzag_columns(lengths, cp_size, rank)
        share = ContextShare.of(columns, predicts, group=None)
        assert (found[share.numbers] == -1).all() and share.num_scored == len(expected)
        found[share.numbers] = output[:, columns].flatten()[share.places]
    assert found.tolist() == expected.tolist()
