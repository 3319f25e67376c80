"""Mini-batches and the dense blocks they are cut into."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.experience.batches import micro_batches, mini_batch_rows
from megatron_rl.records import ActorBatch, Sequences, ragged

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


def actor_batch(rows):
    """rows: (prompt, response) token lists. Fields number the response tokens through the batch: 0, 1, ... and 100+."""
    lengths = torch.tensor([len(response) for _, response in rows])
    numbers = torch.arange(float(lengths.sum())).split(lengths.tolist())
    return ActorBatch(
        input_ids=ragged([torch.tensor(prompt + response) for prompt, response in rows]),
        response_lengths=lengths,
        old_log_probs=ragged(numbers),
        advantages=ragged([number + 100 for number in numbers]),
        batch_size=[len(rows)],
    )


def test_three_rows_in_blocks_of_two():
    """Positions, targets and fields by hand. Would not catch an error that needs an empty response."""
    first, second = micro_batches(actor_batch([([1, 2], [3, 4]), ([5], [6]), ([7, 8], [9])]), 2)
    assert first.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert first.predicts_response.int().tolist() == [[0, 1, 1], [1, 0, 0]]
    assert first.targets.tolist() == [3, 4, 6]
    assert {name: field.tolist() for name, field in first.fields.items()} == {
        "old_log_probs": [0, 1, 2],
        "advantages": [100, 101, 102],
    }
    assert first.num_real_rows == 2

    assert second.input_ids.tolist() == [[7, 8, 9, 0], [0, 0, 0, 0]]
    assert second.predicts_response.int().tolist() == [[0, 1, 0], [0, 0, 0]]
    assert second.targets.tolist() == [9]
    assert second.fields["old_log_probs"].tolist() == [3] and second.fields["advantages"].tolist() == [103]
    assert second.num_real_rows == 1


def test_few_rows_make_one_block_without_filler():
    """Two rows at size 8, no float fields. Would not catch a block that is too narrow."""
    record = Sequences(ragged([torch.tensor([1, 2]), torch.tensor([3, 4, 5])]), torch.tensor([1, 2]), batch_size=[2])
    (block,) = micro_batches(record, 8)
    assert block.input_ids.tolist() == [[1, 2, 0], [3, 4, 5]]
    assert block.fields == {} and block.targets.tolist() == [2, 4, 5]


def test_columns_are_rounded_up():
    """4 columns in multiples of 3 and of 4: the same targets, padding on the right. Would not catch wasted columns."""
    batch = actor_batch([([1, 2], [3, 4]), ([5], [6])])
    (block,) = micro_batches(batch, 2, column_multiple=3)
    assert block.input_ids.tolist() == [[1, 2, 3, 4, 0, 0], [5, 6, 0, 0, 0, 0]]
    assert block.predicts_response.int().tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    assert block.targets.tolist() == [3, 4, 6]
    (block,) = micro_batches(batch, 2, column_multiple=4)
    assert block.input_ids.shape == (2, 4)


def test_a_neutral_block_has_the_shape_and_nothing_else():
    """Beside the block it was made of, which stays. Would not catch a loss that counts rows."""
    (block,) = micro_batches(actor_batch([([1, 2], [3, 4]), ([5], [6])]), 2)
    neutral = block.neutral()
    assert neutral.input_ids.tolist() == [[0] * 4] * 2 and not neutral.predicts_response.any()
    assert neutral.targets.tolist() == [] and neutral.num_real_rows == 0
    assert {name: field.tolist() for name, field in neutral.fields.items()} == {"old_log_probs": [], "advantages": []}
    assert block.targets.tolist() == [3, 4, 6] and block.num_real_rows == 2


def test_neutral_rows_have_no_targets():
    """A rank without work runs and contributes nothing. Would not catch a loss that divides by its own tokens."""
    batch = actor_batch([([1, 2], [3, 4]), ([5], [6])]).neutral()
    (block,) = micro_batches(batch, 2)
    assert block.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert not block.predicts_response.any() and block.targets.tolist() == []
    assert {name: field.tolist() for name, field in block.fields.items()} == {"old_log_probs": [], "advantages": []}


def test_neutral_block():
    """The shape of its model, and no response. Would not catch a model in which zeros become NaN."""
    block = micro_batches(actor_batch([([1, 2], [3]), ([4], [5, 6])]), 2)[0]
    neutral = block.neutral()
    assert neutral.input_ids.tolist() == [[0, 0, 0]] * 2 and neutral.num_real_rows == 0
    assert neutral.predicts_response.tolist() == [[False, False]] * 2 and block.predicts_response.any()
    assert {name: field.tolist() for name, field in neutral.fields.items()} == {"old_log_probs": [], "advantages": []}


token = st.integers(1, 9)
row = st.tuples(st.lists(token, min_size=1, max_size=4), st.lists(token, max_size=4))


@modest
@given(rows=st.lists(row, min_size=1, max_size=7), size=st.integers(1, 4), shuffle=st.randoms(use_true_random=False))
def test_blocks_together_hold_every_response_token_once(rows, size, shuffle):
    """Targets and fields over all blocks, in row order, after indexing too. Would not catch extra columns."""
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    batch = actor_batch(rows)
    numbers = [field.tolist() for field in batch.old_log_probs.unbind()]
    blocks = micro_batches(batch[torch.tensor(order)], size)
    width = max(len(prompt) + len(response) for prompt, response in rows)
    assert {tuple(block.input_ids.shape) for block in blocks} == {(min(size, len(rows)), width)}
    assert torch.cat([block.targets for block in blocks]).tolist() == [token for i in order for token in rows[i][1]]
    for name, shift in (("old_log_probs", 0), ("advantages", 100)):
        expected = [number + shift for i in order for number in numbers[i]]
        assert torch.cat([block.fields[name] for block in blocks]).tolist() == expected
    for block in blocks:
        assert not block.predicts_response[block.num_real_rows :].any()
        assert not block.input_ids[block.num_real_rows :].any()
        assert len(block.fields["advantages"]) == int(block.predicts_response.sum())
    assert sum(block.num_real_rows for block in blocks) == len(rows)
