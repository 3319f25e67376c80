"""The rows of each optimizer step."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.experience.batches import mini_batch_rows

modest = settings(max_examples=60, deadline=None)


@modest
@given(rows=st.integers(1, 20), size=st.integers(1, 25), epochs=st.integers(1, 3), seed=st.integers(0, 5))
def test_every_row_once_per_epoch(rows, size, epochs, seed):
    """A permutation per epoch, cut into full mini-batches and a rest. Would not catch a constant order."""
    batches = [batch.tolist() for batch in mini_batch_rows(rows, size, epochs, seed)]
    per_epoch = -(-rows // size)
    assert len(batches) == epochs * per_epoch
    for epoch in range(epochs):
        mine = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(row for batch in mine for row in batch) == list(range(rows))
        assert [len(batch) for batch in mine[:-1]] == [size] * (per_epoch - 1)
        assert len(mine[-1]) == rows - size * (per_epoch - 1)
    assert batches == [batch.tolist() for batch in mini_batch_rows(rows, size, epochs, seed)]


def test_order_depends_on_seed_and_epoch_and_not_on_global_state():
    """Orders of 50 rows differ or repeat as they should. Would not catch a biased permutation."""

    def orders(seed):
        torch.rand(3)
        return [batch.tolist() for batch in mini_batch_rows(50, 50, 2, seed)]

    assert orders(1) == orders(1) and orders(1)[0] != orders(1)[1] and orders(1)[0] != orders(7)[0]
    stream = torch.get_rng_state()
    list(mini_batch_rows(50, 50, 2, 3))
    assert torch.equal(torch.get_rng_state(), stream)


def test_without_seed_rows_stay_in_order():
    """Five rows in twos, twice. Would not catch an order that is random by accident elsewhere."""
    batches = [batch.tolist() for batch in mini_batch_rows(5, 2, 2, None)]
    assert batches == [[0, 1], [2, 3], [4]] * 2
