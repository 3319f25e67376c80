"""Micro-batches: which rows together, and how they lie in a block."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.experience.micro_batches import (
    MicroBatching,
    in_one_shape,
    in_row_order,
    micro_batches,
)
from megatron_rl.parallel.balance import SequenceWork
from megatron_rl.parallel.zigzag import ContextShare, zigzag_columns
from megatron_rl.records import Batch, prompt_numbers, ragged, single_turn

modest = settings(max_examples=60, deadline=None)


def actor_batch(rows):
    """rows: (prompt, response) token lists. Fields number the response tokens through the batch: 0, 1, ... and 100+."""
    lengths = torch.tensor([len(response) for _, response in rows])
    numbers = torch.arange(float(lengths.sum())).split(lengths.tolist())
    return single_turn(
        ragged([torch.tensor(prompt + response) for prompt, response in rows]),
        lengths,
        old_log_probs=ragged(numbers),
        advantages=ragged([number + 100 for number in numbers]),
    )


def in_order(parts, blocks, batch):
    return in_row_order(zip(blocks, parts, strict=True), batch.num_sampled, parts[0])


THREE = [([1, 2], [3, 4]), ([5], [6]), ([7, 8], [9])]


def test_three_padded_rows_in_blocks_of_two():
    """Positions, targets and fields by hand. Would not catch an error that needs an empty response."""
    first, second = micro_batches(actor_batch(THREE), [[0, 1], [2]], remove_padding=False)
    assert first.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert first.predicts_sampled.int().tolist() == [[0, 1, 1], [1, 0, 0]]
    assert first.targets.tolist() == [3, 4, 6] and first.num_sampled.tolist() == [2, 1]
    assert {name: field.tolist() for name, field in first.fields.items()} == {
        "old_log_probs": [0, 1, 2],
        "advantages": [100, 101, 102],
    }
    assert second.input_ids.tolist() == [[7, 8, 9]] and second.segments is None
    assert second.predicts_sampled.int().tolist() == [[0, 1]] and second.targets.tolist() == [9]
    assert second.fields["old_log_probs"].tolist() == [3] and second.fields["advantages"].tolist() == [103]


def test_three_packed_rows_in_another_order():
    """Positions, targets and fields by hand. Would not catch attention across the border of two rows."""
    first, second = micro_batches(actor_batch(THREE), [[2, 0], [1]], remove_padding=True)
    assert first.input_ids.tolist() == [[7, 8, 9, 1, 2, 3, 4]] and first.segments == (3, 4)
    assert first.predicts_sampled.int().tolist() == [[0, 1, 0, 0, 1, 1]]
    assert first.targets.tolist() == [9, 3, 4] and first.num_sampled.tolist() == [1, 2]
    assert first.fields["old_log_probs"].tolist() == [3, 0, 1] and first.rows.tolist() == [2, 0]
    assert second.input_ids.tolist() == [[5, 6]] and second.targets.tolist() == [6] and second.segments == (2,)
    values = [torch.tensor([30.0, 0.0, 1.0]), torch.tensor([20.0])]
    assert in_order(values, [first, second], actor_batch(THREE)).tolist() == [0, 1, 20, 30]


def test_packed_rows_of_a_multiple_and_what_each_rank_scores():
    """Rows filled up to fours, the block to eights, and the parts of two ranks: by hand.

    Would not catch what travels between ranks; tests/parity does.
    """
    (block,) = micro_batches(
        actor_batch(THREE), [[0, 1, 2]], remove_padding=True, column_multiple=8, segment_multiple=4
    )
    assert block.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 0, 0, 7, 8, 9, 0, 0, 0, 0, 0]]
    assert block.segments == (4, 4, 4, 4) and block.rows.tolist() == [0, 1, 2]
    assert block.predicts_sampled.int().tolist() == [[0, 1, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]]
    assert block.targets.tolist() == [3, 4, 6, 9]
    output = torch.arange(16)[None, :, None]
    for rank, (columns, targets, numbers) in enumerate(
        [([0, 3, 4, 7, 8, 11, 12, 15], [6], [2]), ([1, 2, 5, 6, 9, 10, 13, 14], [3, 4, 9], [0, 1, 3])]
    ):
        mine = zigzag_columns(block.segments, 2, rank)
        share = ContextShare.of(mine, block.predicts_sampled, group=None)
        part = replace(block, share=share)
        assert mine.tolist() == columns and share.numbers.tolist() == numbers
        assert part.targets.tolist() == targets
        assert part.scored(output[:, mine])[:, 0].tolist() == [[1, 2, 4, 9][number] for number in numbers]


def test_two_rows_with_one_prompt():
    """A prompt's last token stays with its answer; by hand. Would not catch attention that forgets the prompt."""
    batch = actor_batch([([1, 2, 3], [4, 5]), ([6], [7]), ([1, 2, 3], [8]), ([6], [9])])
    assert prompt_numbers(batch) == [0, 1, 0, 1]
    (block,) = micro_batches(batch, [[0, 1, 2, 3]], remove_padding=True, prompts=prompt_numbers(batch))
    assert block.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 3, 8, 6, 9]] and block.segments == (5, 2, 2, 2)
    assert block.prefixes == ((0, 0), (0, 0), (0, 2), (0, 0))
    assert block.predicts_sampled.int().tolist() == [[0, 0, 1, 1, 0, 1, 0, 1, 0, 1]]
    assert block.targets.tolist() == [4, 5, 7, 8, 9] and block.fields["old_log_probs"].tolist() == [0, 1, 2, 3, 4]
    assert block.neutral().prefixes == block.prefixes and in_one_shape([block])[0].prefixes == block.prefixes


def test_the_previous_token_lies_elsewhere_behind_a_shared_prompt():
    """By hand: two answers to the prompt 5 6 7, of which the second is stored from its last token on, and a prompt of
    one token; padded, every row begins anew. Would not catch rows that context-parallel ranks share.
    """
    batch = actor_batch([([5, 6, 7], [8, 9]), ([5, 6, 7], [10]), ([3], [4, 2])])
    (block,) = micro_batches(batch, [[0, 1, 2]], remove_padding=True, prompts=[0, 0, 1])
    assert block.input_ids.tolist() == [[5, 6, 7, 8, 9, 7, 10, 3, 4, 2]]
    assert block.prev_index().tolist() == [-1, 0, 1, 2, 3, 1, 5, -1, 7, 8]
    assert block.predicting().tolist() == [2, 3, 5, 7, 8]
    (padded_block,) = micro_batches(batch, [[1, 2]], remove_padding=False)
    assert padded_block.prev_index().tolist() == [-1, 0, 1, 2, -1, 4, 5, 6]


def test_rows_with_one_prompt_go_together():
    """Three prompts, two rows each: 8 tokens hold 2 rows, so 3 blocks; 12 tokens are 2 blocks either way, where only
    rows apart have about equal work in 2 blocks. Would not catch a block over its tokens.
    """
    cut = MicroBatching(num_rows=1, max_tokens=8, work=SequenceWork(10.0))
    assert sorted(cut.plan([4] * 6, prompts=[0, 1, 2, 0, 1, 2])) == [[0, 3], [1, 4], [2, 5]]
    # As many blocks as are asked for come first.
    assert len(cut.plan([4] * 6, 6, prompts=[0, 1, 2, 0, 1, 2])) == 6
    cut = MicroBatching(num_rows=1, max_tokens=12, work=SequenceWork(10.0))
    assert len(cut.plan([4] * 6, prompts=[0, 1, 2, 0, 1, 2])) == 2


def test_columns_are_rounded_up():
    """Padded and packed, to a multiple of 4 that fits and one that does not. Would not catch wasted columns."""
    batch = actor_batch([([1, 2], [3, 4]), ([5], [6])])
    (block,) = micro_batches(batch, [[0, 1]], remove_padding=False, column_multiple=3)
    assert block.input_ids.tolist() == [[1, 2, 3, 4, 0, 0], [5, 6, 0, 0, 0, 0]]
    assert block.predicts_sampled.int().tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    (block,) = micro_batches(batch, [[0, 1]], remove_padding=True, column_multiple=4)
    assert block.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 0, 0]] and block.segments == (4, 2, 2)
    assert block.predicts_sampled.int().tolist() == [[0, 1, 1, 0, 1, 0, 0]] and block.targets.tolist() == [3, 4, 6]
    (block,) = micro_batches(batch, [[0]], remove_padding=True, column_multiple=4)
    assert block.segments == (4,)


def test_blocks_in_one_shape():
    """Three rows in twos, packed and padded, by hand. Would not catch filler that a loss counts."""
    packed = in_one_shape(micro_batches(actor_batch(THREE), [[0, 1], [2]], remove_padding=True))
    assert [block.input_ids.tolist() for block in packed] == [[[1, 2, 3, 4, 5, 6]], [[7, 8, 9, 0, 0, 0]]]
    assert [block.segments for block in packed] == [(4, 2), (3, 3)]
    padded = in_one_shape(micro_batches(actor_batch(THREE), [[0, 1], [2]], remove_padding=False))
    assert [block.input_ids.tolist() for block in padded] == [[[1, 2, 3, 4], [5, 6, 0, 0]], [[7, 8, 9, 0], [0] * 4]]
    for blocks in (packed, padded):
        assert [block.targets.tolist() for block in blocks] == [[3, 4, 6], [9]]
        assert [block.num_sampled.tolist() for block in blocks] == [[2, 1], [1]]


@pytest.mark.parametrize("remove_padding", [False, True])
def test_a_neutral_block_has_the_shape_and_nothing_else(remove_padding):
    """Beside the block it was made of, which stays. Would not catch a loss that counts rows."""
    (block,) = micro_batches(actor_batch([([1, 2], [3, 4]), ([5], [6])]), [[0, 1]], remove_padding)
    neutral = block.neutral()
    assert neutral.input_ids.shape == block.input_ids.shape and neutral.segments == block.segments
    assert not neutral.input_ids.any() and not neutral.predicts_sampled.any()
    assert neutral.targets.tolist() == [] and neutral.rows.tolist() == [] and neutral.kept.tolist() == []
    assert {name: field.tolist() for name, field in neutral.fields.items()} == {"old_log_probs": [], "advantages": []}
    assert block.targets.tolist() == [3, 4, 6] and block.rows.tolist() == [0, 1]


@pytest.mark.parametrize("remove_padding", [False, True])
def test_neutral_rows_have_no_targets(remove_padding):
    """A rank without work runs and contributes nothing. Would not catch a loss that divides by its own tokens."""
    batch = actor_batch([([1, 2], [3, 4]), ([5], [6])]).neutral()
    (block,) = micro_batches(batch, [[0, 1]], remove_padding)
    assert block.input_ids.sum() == 21 and block.num_sampled.tolist() == [0, 0]
    assert not block.predicts_sampled.any() and block.targets.tolist() == []
    assert {name: field.tolist() for name, field in block.fields.items()} == {"old_log_probs": [], "advantages": []}


token = st.integers(1, 9)
row = st.tuples(st.lists(token, min_size=1, max_size=4), st.lists(token, max_size=4))
cuts = st.builds(
    MicroBatching,
    num_rows=st.integers(1, 4),
    max_tokens=st.one_of(st.none(), st.integers(8, 20)),
    remove_padding=st.booleans(),
    work=st.just(SequenceWork(10.0)),
)


@modest
@given(rows=st.lists(row, min_size=1, max_size=9), cut=cuts, num_blocks=st.integers(1, 3), copies=st.integers(1, 4))
def test_shared_prompts_leave_every_response_token_in_place(rows, cut, num_blocks, copies):
    """Targets in row order, tokens and prefixes of every row, no more blocks. Would not catch a prompt kept twice."""
    rows = [(prompt, [*response[1:], number]) for prompt, response in rows for number in range(copies)]
    batch = actor_batch(rows)
    lengths = [len(prompt) + len(response) for prompt, response in rows]
    numbers = prompt_numbers(batch)
    plan = cut.plan(lengths, num_blocks, prompts=numbers)
    assert sorted(row for block in plan for row in block) == list(range(len(rows)))
    assert len(plan) <= len(cut.plan(lengths, num_blocks))
    blocks = micro_batches(batch, plan, True, prompts=numbers)
    expected = [token for _, response in rows for token in response]
    assert in_order([block.targets for block in blocks], blocks, batch).tolist() == expected
    for block, members in zip(blocks, plan, strict=True):
        assert cut.max_tokens is None or sum(lengths[row] for row in members) <= cut.max_tokens
        column, tokens = 0, block.input_ids[0].tolist()
        for row, length, (first, shared) in zip(members, block.segments, block.prefixes, strict=True):
            assert tokens[first : first + shared] + tokens[column : column + length] == sum(rows[row], [])
            column += length


@modest
@given(rows=st.lists(row, min_size=1, max_size=9), cut=cuts, column_multiple=st.integers(1, 3))
def test_blocks_together_hold_every_response_token_once(rows, cut, column_multiple):
    """Targets and fields of all blocks, put in row order. Would not catch extra columns, nor wrong segments."""
    batch = actor_batch(rows)
    lengths = [len(prompt) + len(response) for prompt, response in rows]
    plan = cut.plan(lengths)
    assert sorted(row for block in plan for row in block) == list(range(len(rows)))
    blocks = micro_batches(batch, plan, cut.remove_padding, column_multiple)
    expected = [token for _, response in rows for token in response]
    assert in_order([block.targets for block in blocks], blocks, batch).tolist() == expected
    for name in ("old_log_probs", "advantages"):
        assert in_order([block.fields[name] for block in blocks], blocks, batch).tolist() == batch.flat(name).tolist()
    for block, members in zip(blocks, plan, strict=True):
        assert int(block.predicts_sampled.sum()) == int(block.num_sampled.sum()) == len(block.fields["advantages"])
        tokens = sum(lengths[row] for row in members)
        assert block.input_ids.shape[1] % column_multiple == 0
        if cut.remove_padding:
            assert tokens <= block.input_ids.numel() < tokens + column_multiple
            assert sum(block.segments) == block.input_ids.numel()
        if cut.is_dynamic:
            assert tokens <= cut.max_tokens


def test_fixed_blocks_are_cut_in_order():
    """Seven rows in threes, whatever their lengths. Would not catch an order that only long rows upset."""
    assert MicroBatching(3).plan([9, 1, 1, 1, 8, 1, 1]) == [[0, 1, 2], [3, 4, 5], [6]]


@modest
@given(
    rows=st.lists(st.lists(st.booleans(), max_size=7), min_size=1, max_size=7),
    cut=cuts,
    copies=st.integers(1, 3),
    size=st.sampled_from([1, 2]),
    shares=st.booleans(),
)
def test_tokens_between_sampled_ones_are_no_targets(rows, cut, copies, size, shares):
    """Packed or padded, with shared prompts or for two context-parallel ranks: the targets are the sampled tokens in
    their order, and each is predicted from the token before it. Would not catch attention to tokens that were left out.
    """
    masks = [torch.tensor([False, *row]) for row in rows for _ in range(copies)]
    tokens = [100 * (number // copies) + torch.arange(len(mask)) for number, mask in enumerate(masks)]
    batch = Batch(input_ids=ragged(tokens), sampled=ragged(masks))
    numbers = prompt_numbers(batch) if shares and size == 1 and cut.remove_padding else None
    plan = cut.plan([len(mask) for mask in masks], prompts=numbers)
    multiple = 2 * size
    blocks = micro_batches(batch, plan, cut.remove_padding, multiple, numbers, multiple if numbers is None else 1)
    drawn = torch.cat([ids[mask] for ids, mask in zip(tokens, masks, strict=True)])
    assert in_order([block.targets for block in blocks], blocks, batch).tolist() == drawn.tolist()
    for block in blocks:
        before = block.scored(block.input_ids)
        assert (block.targets - before == 1).all() and len(before) == int(block.num_sampled.sum())
        if size == 1:
            continue
        found = torch.full_like(block.targets, -1)
        for rank in range(size):
            segments = block.segments or (block.input_ids.shape[1],)
            columns = zigzag_columns(segments, size, rank)
            part = replace(block, share=ContextShare.of(columns, block.predicts_sampled, group=None))
            found[part.share.numbers] = part.scored(block.input_ids[:, columns]) + 1
            assert torch.equal(part.targets, block.targets[part.share.numbers])
        assert torch.equal(found, block.targets)
