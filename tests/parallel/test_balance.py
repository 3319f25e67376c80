"""Sharing sequences out: even work, few packs, nothing lost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.parallel.balance import SequenceWork, best_fit, pack, share_out, share_out_prompts

modest = settings(max_examples=150, deadline=None)
PARITY = SequenceWork(1000.0)


def test_work_of_a_sequence():
    """A sequence as long as the parity costs twice its tokens. Would not catch a parity of the wrong model."""
    assert PARITY([1000, 100]) == [2000.0, 110.0]


def test_four_sequences_for_two_ranks():
    """5 and 1 against 4 and 2, not 5 and 4 against 2 and 1. Would not catch a slow plan."""
    assert share_out([5, 4, 2, 1], [1] * 4, [2, 2]) == [[0, 3], [1, 2]]


def test_where_the_largest_first_is_not_best_an_exchange_is():
    """3+3 and 2+2+2 are even; the largest first alone gives 3+2+2 and 3+2. Would not catch longer exchanges."""
    parts = share_out([3, 3, 2, 2, 2], [1] * 5, [3, 3])
    assert sorted(sum([3, 3, 2, 2, 2][item] for item in part) for part in parts) == [6, 6]


def test_what_does_not_fit_is_said():
    """Two of 6 and one part of 10. Would not catch a plan that exists and was not found."""
    assert share_out([6, 6], [6, 6], [10]) is None
    with pytest.raises(ValueError, match="11 tokens does not fit into a pack of 10"):
        pack([3, 11], [3, 11], 10)


@modest
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    num_packs=st.integers(1, 5),
    multiple=st.integers(1, 4),
)
def test_packs_hold_every_sequence_once(lengths, num_packs, multiple):
    """Never over the limit, never empty, the number as asked, at most one more than best fit's where nothing is asked.

    Would not catch work that is uneven.
    """
    packs = pack(lengths, PARITY(lengths), 50, num_packs, multiple)
    assert sorted(item for items in packs for item in items) == list(range(len(lengths)))
    assert all(items and sum(lengths[item] for item in items) <= 50 for items in packs)
    assert len(packs) % multiple == 0 or len(packs) == len(lengths)
    assert len(packs) >= min(num_packs, len(lengths))
    wanted = max(num_packs, len(best_fit(lengths, 50)))
    assert len(packs) <= -(-wanted // multiple) * multiple
    assert pack(lengths, PARITY(lengths), 50, num_packs, multiple) == packs


@modest
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=60), num_parts=st.integers(1, 8))
def test_equal_numbers_of_rows(lengths, num_parts):
    """Sizes as given, every row once; not less even than rows in a row. Would not catch a plan that could be better."""
    sizes = [len(lengths) // num_parts + (part < len(lengths) % num_parts) for part in range(num_parts)]
    work = PARITY(lengths)
    parts = share_out(work, [1] * len(work), sizes)
    assert [len(part) for part in parts] == sizes
    assert sorted(item for part in parts for item in part) == list(range(len(work)))


def test_rows_of_a_prompt_go_to_one_rank():
    """Eight rows of two prompts over two ranks; then over four, which take two rows each.

    Would not catch prompts that do not fill the ranks; the next test would.
    """
    prompts, lengths = [0, 1] * 4, [30, 12, 40, 14, 35, 13, 50, 11]
    assert share_out_prompts(prompts, lengths, [20, 10] * 4, PARITY, [4, 4]) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    parts = share_out_prompts(prompts, lengths, [20, 10] * 4, PARITY, [2] * 4)
    assert sorted(sorted(prompts[row] for row in rows) for rows in parts) == [[0, 0], [0, 0], [1, 1], [1, 1]]


@modest
@given(groups=st.lists(st.integers(1, 6), min_size=1, max_size=8), num_parts=st.integers(1, 5), seed=st.integers(0, 9))
def test_prompts_of_any_sizes(groups, num_parts, seed):
    """Every row once, in parts of the given sizes. Would not catch prompts that are scattered without need."""
    rng = random.Random(seed)
    prompts = [number for number, size in enumerate(groups) for _ in range(size)]
    before = [rng.randrange(1, 9)] * len(prompts)
    lengths = [num + rng.randrange(1, 9) for num in before]
    sizes = [len(prompts) // num_parts + (part < len(prompts) % num_parts) for part in range(num_parts)]
    parts = share_out_prompts(prompts, lengths, before, PARITY, sizes)
    assert [len(part) for part in parts] == sizes
    assert sorted(row for part in parts for row in part) == list(range(len(prompts)))


LENGTHS = {
    "lognormal": lambda rng: min(max(int(rng.lognormvariate(6.5, 0.8)), 16), 8192),
    "bimodal": lambda rng: max(1, int(rng.gauss(300, 60) if rng.random() < 0.7 else rng.gauss(5000, 800))),
}


@pytest.mark.parametrize("shape", LENGTHS)
def test_few_packs_of_even_work_on_lengths_as_they_occur(shape):
    """512 sequences: packs within 4% of the bound, work within 1% of its mean. Would not catch other distributions."""
    rng = random.Random(1)
    lengths = [LENGTHS[shape](rng) for _ in range(512)]
    work = SequenceWork(49152.0)(lengths)
    packs = pack(lengths, work, 16384)
    assert len(packs) <= 1.04 * -(-sum(lengths) // 16384)
    for parts in (packs, share_out(work, [1] * 512, [64] * 8)):
        done = [sum(work[item] for item in part) for part in parts]
        assert max(done) <= 1.01 * sum(done) / len(done)
