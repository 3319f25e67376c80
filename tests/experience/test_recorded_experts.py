"""Where tokens lie in a block, and what that makes of experts that are told and taken down."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.experience.micro_batches import in_one_shape, in_row_order, micro_batches
from megatron_rl.experience.recorded_experts import expert_bytes, num_others, routed_places
from megatron_rl.experience.router_token_index import num_rows_at, places, recorded_experts
from megatron_rl.records import Batch, prompt_numbers, ragged, ragged_from_lengths, row_lengths, single_turn

LAYERS, TOP_K = 3, 2


def record(prompts: list[int], answers: list[int], seed: int = 0, known: int = 1) -> Batch:
    """Rows with the numbered prompts (of 3 tokens more than their number); all but `known` last tokens have experts."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.cat([10 * prompt + torch.arange(3 + prompt), torch.randint(50, 99, (answer,), generator=generator)])
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    lengths = torch.tensor([len(row) - known for row in rows])
    # A token's experts follow from what stands before it, as a model's do.
    experts = [torch.stack([row.cumsum(0)[:-known] * 3 % 7] * LAYERS * TOP_K, -1) for row in rows]
    offsets = torch.arange(LAYERS * TOP_K)
    values = (torch.cat(experts) + offsets).view(-1, LAYERS, TOP_K).to(torch.uint8)
    return single_turn(ragged(rows), torch.tensor(answers), routed_experts=ragged_from_lengths(values, lengths))


def test_places_by_hand() -> None:
    """Two rows of 4 and 3 tokens, padded to 4 columns and packed; routers see columns, and in each of them its rows.

    Would not catch a router that sees them in another order: the tests of layouts do.
    """
    rows = record([0, 0], [1, 0])
    rows.add(single_turn(rows["input_ids"], torch.tensor([2, 1])))
    [padded] = micro_batches(rows, [[0, 1]], remove_padding=False, with_tokens=True)
    assert places(padded).tolist() == [0, 2, 4, 6, 1, 3, 5]
    assert num_rows_at(padded).tolist() == [1] * 7 + [0]
    [packed] = micro_batches(rows, [[0, 1]], remove_padding=True, column_multiple=4, with_tokens=True)
    assert places(packed).tolist() == list(range(7)) and num_rows_at(packed).tolist() == [1] * 7 + [0]
    assert num_rows_at(micro_batches(without_answer(rows), [[0, 1]], False, with_tokens=True)[0]).tolist() == [1, 0] * 4
    # The second row's first token lies in the first row, the others behind it.
    [shared] = micro_batches(rows, [[0, 1]], True, prompts=prompt_numbers(rows), with_tokens=True)
    assert places(shared).tolist() == [0, 1, 2, 3, 0, 4, 5] and num_rows_at(shared).tolist() == [2, 1, 1, 1, 1, 1]
    assert places(shared.neutral()).tolist() == [] and not num_rows_at(shared.neutral()).any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=7), st.booleans(), st.data())
def test_what_is_told_is_taken_down_again(rows, remove_padding, data) -> None:
    """Experts laid into blocks and read back at the tokens' places are the record's, in any cut, shape and order.

    Would not catch two errors that undo each other: the places are checked by hand above.
    """
    sequences = record([prompt for prompt, _ in rows], [answer for _, answer in rows])
    order = data.draw(st.permutations(range(len(rows))))
    size = data.draw(st.integers(1, len(rows)))
    plan = [list(order[start : start + size]) for start in range(0, len(order), size)]
    prompts = prompt_numbers(sequences, sequences["routed_experts"]) if remove_padding else None
    blocks = micro_batches(sequences, plan, remove_padding, 2, prompts, with_tokens=True)
    if data.draw(st.booleans()):
        blocks = [*in_one_shape(blocks), in_one_shape(blocks)[0].neutral()]
    layers = [2, 0]
    found = []
    for block in blocks:
        told = recorded_experts(block, layers)
        assert told is not None
        experts, known = told
        assert len(experts) == block.input_ids.numel() and int(known.sum()) <= len(places(block).unique())
        there = places(block)[block.tokens.routed]
        assert known[there].all()
        found.append((block, experts[there]))
    values = in_row_order(found, row_lengths(sequences["routed_experts"]), found[0][1])
    assert torch.equal(values, sequences.flat("routed_experts")[:, layers])


def test_other_experts_make_another_prompt() -> None:
    """Of a token that rows would share; of the prompt's last token, and of the answer, they do not matter.

    Would not catch a prompt that is equal by chance.
    """
    rows = record([1, 1, 1, 1], [2, 2, 1, 3])
    experts = [part.clone() for part in rows["routed_experts"].unbind()]
    experts[1][2, 0, 1] += 1
    experts[2][3] += 1
    told = ragged_from_lengths(torch.cat(experts), torch.tensor([len(part) for part in experts]))
    assert prompt_numbers(rows) == [0, 0, 0, 0]
    assert prompt_numbers(rows, told) == [0, 1, 0, 0]


def test_others_by_hand() -> None:
    """Two rows of 2 and 1 tokens of which 1 and 1 are known; order does not count. Would not catch layers of others."""
    theirs = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [0, 1]]], dtype=torch.uint8)
    own = torch.tensor([[[1, 0], [3, 4]], [[9, 9], [9, 9]], [[0, 1], [2, 3]]], dtype=torch.uint8)
    lengths = torch.tensor([2, 1])
    assert num_others(theirs, torch.tensor([1, 1]), own, lengths, lengths).tolist() == [1, 4]


@pytest.mark.parametrize(
    ("num_known", "expected"),
    [
        ([7, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),  # the routers of the trainer
        ([5, 2], [0, 1, 3, 4, 5, 7, 8]),
        ([3, 0], [0, 1, 3]),
        ([0, 1], [7]),
    ],
)
def test_an_engine_reads_no_conversations_last_token(num_known: list[int], expected: list[int]) -> None:
    """By hand: a row of conversations of 3 and 4 tokens, and one of 3, whole, cut off and unknown. Would not catch a
    conversation that begins with tokens of the one before.
    """
    known, lengths, sequences = torch.tensor(num_known), torch.tensor([7, 3]), torch.tensor([3, 4, 3])
    assert routed_places(known, lengths, sequences).tolist() == expected
    with pytest.raises(ValueError, match=r"rows of \[7, 3\] tokens, in conversations of \[3, 4, 3\], .* \[6, 3\]"):
        routed_places(torch.tensor([6, 3]), lengths, sequences)
    starts = [torch.tensor([False, False, False, True, False, False, False]), torch.zeros(3, dtype=torch.bool)]
    experts = torch.arange(1, 1 + sum(num_known), dtype=torch.uint8).view(-1, 1, 1)
    rows = Batch(
        input_ids=ragged([torch.arange(7), torch.arange(3)]),
        conversation_starts=ragged(starts),
        sampled=ragged([torch.zeros(7, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)]),
        routed_experts=ragged_from_lengths(experts, known),
    )
    found = expert_bytes(rows, [1, 0]).flatten().tolist()
    assert [place for place, value in enumerate([*found[3:], *found[:3]]) if value] == expected
    assert sorted(value for value in found if value) == experts.flatten().tolist()


def test_blocks_without_known_experts_tell_nothing() -> None:
    """Would not catch a pass that asks for them nevertheless."""
    rows = replace_experts(record([0, 1], [1, 2]))
    [block] = micro_batches(rows, [[0, 1]], True, with_tokens=True)
    assert recorded_experts(block, [0]) is None and block.tokens.lengths.tolist() == [4, 6]
    assert replace(block, tokens=None).tokens is None


def without_answer(rows: Batch) -> Batch:
    """The second row fills up a split."""
    return single_turn(rows["input_ids"], torch.tensor([2, 0]), routed_experts=rows["routed_experts"])


def replace_experts(rows: Batch) -> Batch:
    return rows.without("routed_experts")
