"""What a checksum sees and what it does not."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.hybrid_engine import verify
from megatron_rl.hybrid_engine.verify import Checksums, runs_of_rows

DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def checksum(tensor):
    """The tensor's checksum, computed among those of others."""
    others = [torch.ones(3), torch.ones(2, 2, 2)]
    return int(Checksums([others[0], tensor, others[1]], torch.device("cpu")).compute()[1])


def random_tensor(shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors_below(thing):
    """The tensors that a thing refers to, through containers and through instances of this project's classes."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, (list, tuple, dict)) or type(thing).__module__ == verify.__name__:
        return [tensor for below in gc.get_referents(thing) for tensor in tensors_below(below)]
    return []


@settings(max_examples=80, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dtype=st.sampled_from(list(DTYPES)),
    data=st.data(),
)
def test_any_flipped_bit_is_seen(shape, dtype, data):
    """Every position and every bit. Would not catch two flips that cancel."""
    tensor = random_tensor(shape, dtype)
    before = checksum(tensor)
    bits = tensor.view(DTYPES[dtype]).view(-1)
    position = data.draw(st.integers(0, tensor.numel() - 1))
    bit = data.draw(st.integers(0, 8 * tensor.element_size() - 2))
    bits[position] ^= 1 << bit
    assert checksum(tensor) != before
    bits[position] ^= 1 << bit
    assert checksum(tensor) == before


@pytest.mark.parametrize("row", range(9))
def test_the_highest_bits_of_every_row_are_seen(row):
    """A product mod 2^64 with an even weight would lose them. Would not catch two flips that cancel."""
    tensor = random_tensor((9, 4), torch.float32)
    before = checksum(tensor)
    for bit in range(24, 31):
        flipped = tensor.clone()
        flipped.view(torch.int32)[row, 3] ^= 1 << bit
        assert checksum(flipped) != before


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("columns", [5, 8])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_content_counts_and_memory_layout_does_not(dtype, columns, offset):
    """Contiguous, strided and misaligned copies of one box. Would not catch boxes of another shape."""
    tensor = random_tensor((6, columns), dtype)
    wide = random_tensor((6, 2 * columns + 8), dtype, seed=1)
    view = wide[:, offset : offset + columns]
    view.copy_(tensor)
    assert checksum(view) == checksum(tensor)
    assert checksum(random_tensor((6, columns), dtype, seed=2)) != checksum(tensor)


def test_exchanged_rows_are_seen_and_permuted_words_of_one_row_are_not():
    """The limit that the module states. Would not catch a limit it does not state."""
    tensor = random_tensor((4, 8), torch.float32)
    assert checksum(tensor[[1, 0, 2, 3]]) != checksum(tensor)
    assert checksum(tensor.view(4, 4, 2)[:, [1, 0, 2, 3]].reshape(4, 8)) == checksum(tensor)


def test_checksum_by_hand():
    """Rows of one and of two words, and of a length that is none. Would not catch an overflow that is not modular."""
    words = torch.tensor([[1, 2], [10, 20], [100, 200]])
    bits = torch.tensor([[3, 4, 5], [6, 7, 8]], dtype=torch.int32).view(torch.float32)
    found = Checksums([words, words[:, :1], bits], torch.device("cpu")).compute()
    assert found.tolist() == [3 + 3 * 30 + 5 * 300, 1 + 3 * 10 + 5 * 100, 12 + 3 * 21]
    assert Checksums([], torch.device("cpu")).compute().tolist() == []


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 9), max_size=12), most=st.integers(1, 12))
def test_runs_of_tensors_change_no_checksum(counts, most):
    """However many rows are summed at once, which no run exceeds. Would not catch a wrong limit."""
    tensors = [random_tensor((count, 4), torch.bfloat16, seed) for seed, count in enumerate(counts)]
    alone = [Checksums([tensor], torch.device("cpu")).compute() for tensor in tensors]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "MOST_ROWS", most)
        runs = runs_of_rows(counts)
        found = Checksums(tensors, torch.device("cpu")).compute()
    assert found.tolist() == [int(one) for one in alone]
    assert [number for first, stop, _ in runs for number in range(first, stop)] == list(range(len(counts)))
    assert all(num_rows <= most or stop == first + 1 for first, stop, num_rows in runs)


def test_nothing_is_kept_for_every_row():
    """A million short rows: between calls no memory but a number. Would not catch memory during a call."""
    rows = torch.ones(1 << 20, 4)
    sums = Checksums([rows], torch.device("cpu"))
    sums.compute()
    kept = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors_below(sums)}
    assert kept.pop(rows.untyped_storage().data_ptr()) == 1 << 24  # the walk sees what an instance refers to
    assert sum(kept.values()) < 1e6
