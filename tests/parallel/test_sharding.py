"""How tensors are cut: by hand, and against torch's own chunking of numbered elements."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.parallel.sharding import (
    LogicalTensor,
    Part,
    Place,
    Segment,
    Shard,
    box_numel,
    cut,
    intersect,
    padded_vocab_size,
    shard_of,
)

QKV = LogicalTensor("qkv", (Segment("q", (8, 3), 4), Segment("k", (4, 3), 2), Segment("v", (4, 3), 2)), tp_dim=0)
EXPERTS = LogicalTensor("w13", tuple(Segment(name, (4, 6, 5), 6) for name in ("gate", "up")), 1, is_expert=True)


def numbered(tensor):
    """Each segment as a tensor whose elements are all different numbers above 0."""
    segments, start = [], 1
    for segment in tensor.segments:
        count = torch.Size(segment.shape).numel()
        segments.append(torch.arange(start, start + count).view(segment.shape))
        start += count
    return segments


def filled(tensor, place):
    """The shard at `place`, its elements numbered; padding is 0."""
    shard, segments = shard_of(tensor, place), numbered(tensor)
    result = torch.zeros(shard.shape, dtype=torch.int64)
    for part in shard.parts:
        result[part.index] = segments[part.segment][tuple(slice(start, stop) for start, stop in part.box)]
    return result


def test_qkv_on_the_second_of_two_ranks():
    """Rows by hand: 4 query heads and 2 key/value heads of size 2. Would not catch an error of the first rank."""
    shard = shard_of(QKV, Place(1, 2, 64))
    assert shard == Shard(
        (8, 3),
        (
            Part(0, ((4, 8), (0, 3)), (0, 0)),
            Part(1, ((2, 4), (0, 3)), (4, 0)),
            Part(2, ((2, 4), (0, 3)), (6, 0)),
        ),
    )
    assert not shard.is_padded


def test_fewer_key_value_heads_than_ranks():
    """4 ranks share 2 heads in pairs, as vLLM repeats them. Would not catch query heads cut in two."""
    rows = [[part.box[0] for part in shard_of(QKV, Place(rank, 4, 64)).parts] for rank in range(4)]
    assert rows == [
        [(0, 2), (0, 2), (0, 2)],
        [(2, 4), (0, 2), (0, 2)],
        [(4, 6), (2, 4), (2, 4)],
        [(6, 8), (2, 4), (2, 4)],
    ]


@pytest.mark.parametrize(
    ("multiple", "shapes", "boxes"),
    [
        (64, [(64, 2), (64, 2)], [[((0, 64), (0, 2))], [((64, 70), (0, 2))]]),
        (144, [(72, 2), (72, 2)], [[((0, 70), (0, 2))], []]),
    ],
)
def test_vocabularies_are_padded_for_each_layout(multiple, shapes, boxes):
    """70 rows on two ranks under two paddings. Would not catch real rows beside padding in one column."""
    rows = LogicalTensor("embedding", (Segment("rows", (70, 2), 70),), 0, is_vocab=True)
    shards = [shard_of(rows, Place(rank, 2, multiple)) for rank in range(2)]
    assert [shard.shape for shard in shards] == shapes
    assert [[part.box for part in shard.parts] for shard in shards] == boxes
    assert shards[1].is_padded


@pytest.mark.parametrize(("vocab", "padded"), [(1, 64), (64, 64), (65, 128), (151_936, 151_936), (32_001, 32_064)])
def test_padded_vocab_size(vocab, padded):
    """Up to a multiple of 64. Would not catch a padding that vLLM changes."""
    assert padded_vocab_size(vocab, 64) == padded


@settings(max_examples=60, deadline=None)
@given(data=st.data(), tp_size=st.sampled_from([1, 2, 3, 4]), dim=st.integers(0, 2))
def test_shards_are_torchs_chunks(data, tp_size, dim):
    """Stacked segments cut one by one along any dim. Would not catch a wrong order of segments in both."""
    shape = [data.draw(st.integers(1, 4)) for _ in range(3)]
    sizes = [tp_size * data.draw(st.integers(1, 3)) for _ in range(data.draw(st.integers(1, 3)))]
    segments = tuple(Segment(str(i), (*shape[:dim], size, *shape[dim + 1 :]), size) for i, size in enumerate(sizes))
    tensor = LogicalTensor("x", segments, dim)
    for rank in range(tp_size):
        expected = torch.cat([whole.chunk(tp_size, dim)[rank] for whole in numbered(tensor)], dim)
        assert torch.equal(filled(tensor, Place(rank, tp_size, 64)), expected)


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (1, 2), (2, 3), (4, 2)])
def test_experts_are_dealt_out_and_cut(ep, etp):
    """Chunks of experts, then of gate and up. Would not catch experts that rank orders of Megatron deal otherwise."""
    for ep_rank in range(ep):
        for etp_rank in range(etp):
            mine = [whole.chunk(ep)[ep_rank].chunk(etp, 1)[etp_rank] for whole in numbered(EXPERTS)]
            place = Place(0, 1, 64, ep_rank=ep_rank, ep_size=ep, etp_rank=etp_rank, etp_size=etp)
            assert torch.equal(filled(EXPERTS, place), torch.cat(mine, 1))


def test_layouts_that_cannot_be_cut_are_refused():
    """Names and numbers in the message. Would not catch a cut inside a head that divides evenly."""
    with pytest.raises(ValueError, match=r"^qkv: tp\(3\) and the 4 units of q do not divide each other"):
        shard_of(QKV, Place(0, 3, 64))
    with pytest.raises(ValueError, match="^w13: 3 ranks do not divide the 4 experts$"):
        shard_of(EXPERTS, Place(0, 1, 64, ep_size=3))
    rows = LogicalTensor("embedding", (Segment("rows", (70, 2), 70),), 0, is_vocab=True)
    with pytest.raises(ValueError, match="^embedding: 3 ranks do not divide the 128 padded rows$"):
        shard_of(rows, Place(0, 3, 64))
    assert cut(Segment("k", (6, 2), 3), 0, rank=5, size=6) == (4, 6)


boxes = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=2, max_size=2).map(
    lambda sides: tuple((start, start + size) for start, size in sides)
)


@given(one=boxes, other=boxes)
def test_intersection_is_that_of_the_elements(one, other):
    """Against sets of points. Would not catch boxes of different segments being compared."""

    def points(box):
        return {(x, y) for x in range(*box[0]) for y in range(*box[1])}

    common = intersect(one, other)
    assert (points(common) if common else set()) == points(one) & points(other)
    assert box_numel(common) > 0 if common else True
