"""Splitting, padding and joining of one call's rows: no processes."""

from __future__ import annotations

import pickle

import pytest
import torch
from toy_worker import toy

from megatron_rl.cluster.routing import (
    Split,
    chunk_sizes,
    join_answers,
    payloads_of_replicas,
    route_call,
    split_call,
)
from megatron_rl.dispatch import Coordinates, Dispatch, ExtraBatch
from megatron_rl.parallel.balance import SequenceWork
from megatron_rl.records import Batch, ragged, single_turn


def toys(num_rows: int) -> Batch:
    tokens = ragged([torch.arange(row + 1) + 10 * row for row in range(num_rows)])
    return toy(torch.arange(num_rows), tokens)


def coordinates() -> list[Coordinates]:
    """dp=2 x tp=2 with the second tp rank collecting; three replicas, the middle one with two ranks."""
    replicas = [(2, True), (1, False), (1, True), (0, True)]
    return [
        Coordinates(rank, rank // 2, 2, rank % 2 == 1, replica, 3, collects)
        for rank, (replica, collects) in enumerate(replicas)
    ]


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7])
def test_chunk_sizes_are_even_and_complete(num_chunks: int) -> None:
    """Would not catch a split that is even but pointless, like one that puts long rows together."""
    for num_rows in range(20):
        sizes = chunk_sizes(num_rows, num_chunks)
        assert sum(sizes) == num_rows and len(sizes) == num_chunks
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_routes_follow_the_coordinates() -> None:
    """Would not catch coordinates that are consistent but wrong about the process groups."""
    dp = route_call(Dispatch.DP, 4, coordinates())
    assert dp.chunk_of_rank == {0: 0, 1: 0, 2: 1, 3: 1} and dp.collectors == (1, 3)
    replicas = route_call(Dispatch.REPLICAS, 4, coordinates())
    assert replicas.chunk_of_rank == {0: 2, 1: 1, 2: 1, 3: 0} and replicas.collectors == (3, 2, 0)
    assert route_call(Dispatch.ONE_TO_ALL, 4, []).collectors == (0, 1, 2, 3)
    assert route_call(Dispatch.RANK_ZERO, 4, []).chunk_of_rank == {0: 0}


def test_a_chunk_without_a_collector_is_refused() -> None:
    """Would not catch a collector that exists but lacks the answer, such as a first pipeline stage."""
    with pytest.raises(ValueError, match="DP needs one collector for each of 2 chunks"):
        route_call(Dispatch.DP, 3, coordinates()[:3])


def test_split_keeps_order_and_shares_what_is_no_record() -> None:
    """Would not catch records nested inside a list, which are passed whole on purpose."""
    shared = {"lr": 0.1}
    split = split_call((toys(5), shared), {"second": toys(5)}, 2)
    assert split.sizes == [3, 2]
    for (args, kwargs), rows in zip(split.payloads, [[0, 1, 2], [3, 4]], strict=True):
        assert args[0]["groups"].tolist() == rows and kwargs["second"]["groups"].tolist() == rows
        assert [row.tolist() for row in args[0]["input_ids"].unbind()] == [
            [10 * r + i for i in range(r + 1)] for r in rows
        ]
        assert args[1] is shared


def test_each_replica_gets_its_entry_of_every_dict() -> None:
    """In a pool of several; a replica that is a pool of its own gets the whole, under its number in the run.

    Would not catch a dict inside a list, which is passed whole on purpose.
    """
    args, kwargs = ({0: "a", 2: "c"}, "all"), {"more": {1: "b"}}
    assert payloads_of_replicas(args, kwargs, 3) == [
        (({0: "a"}, "all"), {"more": {}}),
        (({}, "all"), {"more": {1: "b"}}),
        (({2: "c"}, "all"), {"more": {}}),
    ]
    ((only, _),) = payloads_of_replicas(({7: "a"},), {}, 1)
    assert only == ({7: "a"},)
    first, second = payloads_of_replicas(("all",), {}, 2)
    assert first is second  # packed once


def test_split_of_a_call_without_records_copies_the_payload_to_every_chunk() -> None:
    """Would not catch the cost of storing a large argument once per chunk."""
    assert split_call((1,), {"to": "b"}, 3) == Split([((1,), {"to": "b"})] * 3)


def test_a_chunk_is_pickled_without_the_rest_of_the_batch() -> None:
    """Would not catch a second copy that Ray itself may make."""
    tokens = ragged([torch.zeros(1000, dtype=torch.int64)] * 64)
    batch = toy(torch.arange(64), tokens)
    split = split_call((batch,), {}, 64)
    assert len(pickle.dumps(split.payloads[5])) < 2 * 8 * 1000


def test_empty_chunks_are_padded_with_a_neutral_row_and_dropped_again() -> None:
    """Would not catch a worker that ignores what `neutral` says."""
    split = split_call((toys(2),), {}, 4)
    chunks = [args[0] for args, _ in split.payloads]
    assert split.sizes == [1, 1, 0, 0]
    assert [chunk["groups"].tolist() for chunk in chunks] == [[0], [1], [0], [0]]
    assert [chunk["weights"].tolist() for chunk in chunks] == [[1], [1], [0], [0]]
    assert join_answers(chunks, split)["groups"].tolist() == [0, 1]


def test_a_record_beside_is_shared_out_by_itself() -> None:
    """Five rows with two beside them on three chunks, in order; and by work, where a long row is alone. Would not catch
    a worker that takes the wrapper for the record."""
    split = split_call((toys(5), ExtraBatch(toys(2))), {}, 3)
    assert split.sizes == [2, 2, 1]
    assert [args[0]["groups"].tolist() for args, _ in split.payloads] == [[0, 1], [2, 3], [4]]
    beside = [args[1].record for args, _ in split.payloads]
    assert [one["groups"].tolist() for one in beside] == [[0], [1], [0]]
    assert [one["weights"].tolist() for one in beside] == [[1], [1], [0]]

    def rows(lengths: list[int]) -> Batch:
        tokens = ragged([torch.full((length,), row) for row, length in enumerate(lengths)])
        return single_turn(tokens, torch.zeros(len(lengths), dtype=torch.int64))

    balanced = split_call((rows([9, 9]),), {"beside": ExtraBatch(rows([1, 1, 1, 30]))}, 2, SequenceWork(100.0))
    lengths = [
        sorted(len(row) for row in kwargs["beside"].record["input_ids"].unbind()) for _, kwargs in balanced.payloads
    ]
    assert sorted(lengths) == [[1, 1], [1, 30]]


def test_actor_batches_pad_with_empty_responses() -> None:
    """Would not catch a loss that divides by a number of rows that includes the padding."""
    response = ragged([torch.ones(2)])
    batch = single_turn(ragged([torch.arange(5)]), torch.tensor([2]), old_log_probs=response, advantages=response)
    padding = split_call((batch,), {}, 2).payloads[1][0][0]
    assert padding.num_sampled.tolist() == [0] and padding.flat("advantages").numel() == 0
    assert padding.flat("input_ids").tolist() == [0, 1, 2, 3, 4]


def objects() -> Batch:
    """Toys with what the controller alone reads."""
    batch = toys(2)
    batch.add(extra_info=[{}, {}])
    return batch


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((toys(3), toys(2)), r"same number of rows, got \[3, 2\]"),
        ((toys(3)[:0],), "have no rows"),
        ((objects(),), "this call has extra_info"),
    ],
)
def test_records_that_cannot_be_split_are_refused(args: tuple, message: str) -> None:
    """Would not catch records of equal length whose rows belong to different samples."""
    with pytest.raises(ValueError, match=message):
        split_call(args, {}, 2)


def test_answers_join_by_their_kind() -> None:
    """Would not catch metrics that a worker forgot to reduce over ranks."""
    joined = join_answers([toys(3)[:1], toys(3)[1:]], Split([]))
    assert joined["groups"].tolist() == [0, 1, 2] and joined.flat("input_ids").tolist() == [0, 10, 11, 20, 21, 22]
    assert join_answers([{"loss": 1}, {"loss": 2}], Split([], [1, 1])) == {"loss": 1}
    assert join_answers([None, None, None], Split([], [1, 1, 0])) is None
    assert join_answers([7, 8, 9], Split([], [1, 1, 0])) == [7, 8]


def test_rows_are_shared_out_by_their_work_and_come_back_in_order() -> None:
    """Five rows of very different lengths on two ranks, by hand. Would not catch work of the wrong model."""
    lengths = [1, 50, 1, 49, 2]
    tokens = ragged([torch.full((length,), row) for row, length in enumerate(lengths)])
    sequences = single_turn(tokens, torch.zeros(5, dtype=torch.int64))
    split = split_call((sequences, 0.5), {}, 2, SequenceWork(100.0))
    assert split.sizes == [3, 2]
    chunks = [args[0] for args, _ in split.payloads]
    sums = [chunk.flat("input_ids").numel() for chunk in chunks]
    assert sums == [52, 51] and all(args[1] == 0.5 for args, _ in split.payloads)
    answers = [
        toy(torch.stack([row[0] for row in chunk["input_ids"].unbind()]), chunk["input_ids"]) for chunk in chunks
    ]
    joined = join_answers(answers, split)
    assert joined["groups"].tolist() == [0, 1, 2, 3, 4]
    assert [row.tolist() for row in joined["input_ids"].unbind()] == [row.tolist() for row in tokens.unbind()]


def test_rows_of_a_prompt_go_to_one_rank_where_it_is_computed_once() -> None:
    """Four rows of two prompts, whose lengths alone would mix them. Would not catch prompts of different sizes."""
    ids = ragged([torch.tensor([number % 2, 7, *[9] * size]) for number, size in enumerate((8, 7, 2, 1))])
    rows = single_turn(ids, torch.tensor([8, 7, 2, 1]))
    for by_prompt, wanted in ((True, [[0, 2], [1, 3]]), (False, [[0, 3], [1, 2]])):
        split = split_call((rows,), {}, 2, SequenceWork(100.0, by_prompt))
        assert split.order is not None and split.order.view(2, 2).tolist() == wanted


def test_parts_of_tuples_are_joined_by_themselves() -> None:
    """Two chunks of three rows, shared out by work: the record in the call's order, the dict once.

    Would not catch a tuple inside a tuple.
    """
    work = SequenceWork(attention_parity=float("inf"))
    ids = ragged([torch.arange(length) for length in (2, 9, 4)])
    split = split_call((single_turn(ids, torch.tensor([1, 2, 3])),), {}, 2, work)
    assert split.order is not None and split.order.tolist() != [0, 1, 2]
    answers = [({"loss": 1.0}, args[0]) for args, _ in split.payloads]
    metrics, rows = join_answers(answers, split)
    assert metrics == {"loss": 1.0} and rows.num_sampled.tolist() == [1, 2, 3]
    assert join_answers([({"loss": 1.0}, None)] * 2, split) == ({"loss": 1.0}, None)
