"""What a checksum sees and what it does not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.hybrid_engine.verify import checksum

DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def random_tensor(shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=80, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dtype=st.sampled_from(list(DTYPES)),
    data=st.data(),
)
def test_any_flipped_bit_is_seen(shape, dtype, data):
    """Every position and every bit. Would not catch two flips that cancel."""
    tensor = random_tensor(shape, dtype)
    before = int(checksum(tensor))
    bits = tensor.view(DTYPES[dtype]).view(-1)
    position = data.draw(st.integers(0, tensor.numel() - 1))
    bit = data.draw(st.integers(0, 8 * tensor.element_size() - 2))
    bits[position] ^= 1 << bit
    assert int(checksum(tensor)) != before
    bits[position] ^= 1 << bit
    assert int(checksum(tensor)) == before


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
