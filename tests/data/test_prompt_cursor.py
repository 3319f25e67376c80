"""The visiting order over the prompts of one file."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.prompt_mixture import MixtureCursor, PromptFile
from megatron_rl.errors import ConfigError

sizes = st.integers(min_value=1, max_value=12)


def over(num_prompts, batch_size, shuffle, seed):
    """A cursor over one file."""
    return MixtureCursor([PromptFile("a.parquet", num_prompts, {})], None, batch_size, shuffle, seed)


def test_unshuffled_batches_straddle_epochs():
    """File order wraps round. Would not catch a shuffle that ignores its seed."""
    cursor = over(num_prompts=5, batch_size=3, shuffle=False, seed=0)
    assert [cursor.next_indices() for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_batch_larger_than_dataset():
    """One batch may span several epochs. Would not catch an error in the state after it."""
    assert over(num_prompts=2, batch_size=5, shuffle=False, seed=0).next_indices() == [0, 1, 0, 1, 0]


@given(num_prompts=sizes, batch_size=sizes, seed=st.integers(0, 3))
def test_every_epoch_visits_every_prompt_once(num_prompts, batch_size, seed):
    """Cut the stream into epochs: each is a permutation. Would not catch permutations that are all the same."""
    cursor = over(num_prompts, batch_size, shuffle=True, seed=seed)
    stream = [index for _ in range(3 * num_prompts) for index in cursor.next_indices()]
    for start in range(0, len(stream) - num_prompts + 1, num_prompts):
        assert Counter(stream[start : start + num_prompts]) == Counter(range(num_prompts))


def test_orders_differ_by_epoch_and_seed_and_repeat():
    """Three orders of 100 differ; the same seed gives the same. Would not catch a biased shuffle."""

    def orders(seed):
        cursor = over(num_prompts=100, batch_size=100, shuffle=True, seed=seed)
        return cursor.next_indices(), cursor.next_indices()

    first, second = orders(seed=0)
    assert first != second
    assert orders(seed=1)[0] not in (first, second)
    assert orders(seed=0) == (first, second)


@given(num_prompts=sizes, batch_size=sizes, steps=st.integers(0, 10), shuffle=st.booleans())
def test_resume_continues_exactly(num_prompts, batch_size, steps, shuffle):
    """A fresh cursor with the saved state goes on like the old one. Would not catch state that JSON cannot hold."""
    old = over(num_prompts, batch_size, shuffle, seed=7)
    for _ in range(steps):
        old.next_indices()
    new = over(num_prompts, batch_size, shuffle, seed=7)
    new.load_state_dict(old.state_dict())
    assert [new.next_indices() for _ in range(5)] == [old.next_indices() for _ in range(5)]


def test_resume_refuses_another_dataset_or_seed():
    """The message names key and values. Would not catch a dataset of the same size with other rows."""
    state = over(10, 2, shuffle=True, seed=0).state_dict()
    with pytest.raises(ConfigError, match=r"\(num_prompts\) of a.parquet is 11 now and was 10"):
        over(11, 2, shuffle=True, seed=0).load_state_dict(state)
    with pytest.raises(ConfigError, match="seed is 1 now and was 0"):
        over(10, 2, shuffle=True, seed=1).load_state_dict(state)


def test_sizes_must_be_positive():
    """Would not catch sizes that are not integers."""
    with pytest.raises(ConfigError, match="batches of 0 prompts from 4"):
        over(4, 0, shuffle=False, seed=0)
