"""Runs of flattened shards as boxes of whole tensors, on numbered elements."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.checkpoint.blocks import blocks_of, boxes_of_run
from megatron_rl.parallel.sharding import LogicalTensor, Place, Segment, box_index, box_shape, shard_of


def test_run_through_a_matrix_by_hand() -> None:
    """A 4 x 5 matrix, elements 3 to 16. Would not catch a mistake in more than two dims."""
    assert list(boxes_of_run((4, 5), 3, 17)) == [
        (3, ((0, 1), (3, 5))),
        (5, ((1, 3), (0, 5))),
        (15, ((3, 4), (0, 2))),
    ]


def test_run_inside_one_row_by_hand() -> None:
    """Would not catch a run that ends with its row."""
    assert list(boxes_of_run((4, 5), 6, 9)) == [(6, ((1, 2), (1, 4)))]


def test_whole_and_empty_runs() -> None:
    """Would not catch anything between the two."""
    assert list(boxes_of_run((2, 3, 4), 0, 24)) == [(0, ((0, 2), (0, 3), (0, 4)))]
    assert list(boxes_of_run((2, 3), 4, 4)) == []


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_boxes_are_the_run(sizes: list[int], data: st.DataObject) -> None:
    """In order, every element once, each box contiguous. Would not catch more boxes than are needed."""
    shape, numel = tuple(sizes), math.prod(sizes)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    numbers = torch.arange(numel).view(shape)
    seen = []
    for first, box in boxes_of_run(shape, start, stop):
        elements = numbers[box_index(box)].flatten().tolist()
        assert elements == list(range(first, first + math.prod(box_shape(box))))
        seen += elements
    assert seen == list(range(start, stop))


TENSORS = {
    "qkv": (LogicalTensor("qkv", (Segment("q", (8, 3), 4), Segment("k", (4, 3), 2), Segment("v", (4, 3), 2)), 0), 2),
    "row-cut": (LogicalTensor("down", (Segment("columns", (3, 8), 8),), 1), 4),
    "vocab": (LogicalTensor("rows", (Segment("rows", (13, 2), 13),), 0, is_vocab=True), 4),
    "experts": (
        LogicalTensor("w13", (Segment("gate", (4, 6, 2), 6), Segment("up", (4, 6, 2), 6)), 1, is_expert=True),
        2,
    ),
    "replicated": (LogicalTensor("norm", (Segment("all", (7,), 1),), None), 2),
}


@given(st.sampled_from(sorted(TENSORS)), st.integers(1, 4), st.data())
def test_every_element_is_saved_once(name: str, dp_size: int, data: st.DataObject) -> None:
    """Any cut of the flattened shards of all ranks, blocks put together, is the whole tensor; padding is left out.

    Would not catch a replica that is saved too, which `dist_checkpointing` refuses.
    """
    tensor, tp_size = TENSORS[name]
    whole = [torch.arange(math.prod(segment.shape)).view(segment.shape) for segment in tensor.segments]
    found = [torch.full(segment.shape, -1) for segment in tensor.segments]
    for rank in range(tp_size if tensor.tp_dim is not None else 1):
        place = Place(rank, tp_size, vocab_multiple=16, etp_rank=rank, etp_size=tp_size)
        shard = shard_of(tensor, place)
        local = torch.full(shard.shape, -7)
        for part in shard.parts:
            local[part.index] = whole[part.segment][box_index(part.box)]
        cuts = sorted(data.draw(st.lists(st.integers(0, shard.numel), min_size=dp_size - 1, max_size=dp_size - 1)))
        for start, stop in zip([0, *cuts], [*cuts, shard.numel], strict=True):
            run = local.flatten()[start:stop]
            for block in blocks_of(shard, start, stop):
                target = found[block.segment][box_index(block.box)]
                assert (target == -1).all()
                target.copy_(block.view(run, start))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, whole, strict=True))
