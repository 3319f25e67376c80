"""How the scales of blocks are cut: as the elements that they stand for, on every rank, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.parallel.scale_blocks import common_extent, scales_of, scales_shard
from megatron_rl.parallel.sharding import LogicalTensor, Place, Segment, shard_of

QKV = LogicalTensor("qkv", (Segment("q", (8, 4), 4), Segment("k", (4, 4), 2), Segment("v", (4, 4), 2)), tp_dim=0)


def places(tp_size: int) -> list[Place]:
    return [Place(rank, tp_size, 1) for rank in range(tp_size)]


def test_scales_of_stacked_heads_by_hand():
    """Heads of two rows in blocks of two: a scale for each head and half of the columns. Would not catch other cuts."""
    scales = scales_of(QKV, 2)
    assert scales == LogicalTensor(
        "qkv_scale_inv", (Segment("q", (4, 2), 4), Segment("k", (2, 2), 2), Segment("v", (2, 2), 2)), tp_dim=0
    )
    shard = shard_of(scales, Place(1, 2, 1))
    assert shard.shape == (4, 2)
    assert [(part.box[0], part.at[0]) for part in shard.parts] == [((2, 4), 0), ((1, 2), 2), ((1, 2), 3)]


def test_several_heads_in_a_block_are_one_unit():
    """Blocks of four rows hold two heads, so that two ranks can share q, and one k. Would not catch odd ratios."""
    assert [segment.num_units for segment in scales_of(QKV, 4).segments] == [2, 1, 1]
    assert common_extent([QKV], [Place(0, 1, 1)]) == 4
    assert common_extent([QKV], [Place(0, 2, 1)]) == 2
    with pytest.raises(ValueError, match=r"qkv.q \(8, 4\) is not made of blocks of 3 x 3"):
        scales_of(QKV, 3)


def test_experts_are_matrices_of_their_own():
    """Four experts of 8 x 6 over EP 2 and ETP 3, by hand. Would not catch an uneven cut, which there is not."""
    experts = LogicalTensor("w2", (Segment("columns", (4, 8, 6), 6),), tp_dim=2, is_expert=True)
    scales = scales_of(experts, 2)
    assert scales == LogicalTensor("w2_scale_inv", (Segment("columns", (4, 4, 3), 3),), tp_dim=2, is_expert=True)
    place = Place(0, 1, 1, ep_rank=1, ep_size=2, etp_rank=2, etp_size=3)
    (part,) = shard_of(scales, place).parts
    assert part.box == ((2, 4), (0, 4), (2, 3))
    assert shard_of(scales, place) == scales_shard(shard_of(experts, place), 2)
    assert common_extent([experts], [place]) == 2


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 12)), min_size=1, max_size=3),
    st.integers(1, 24),
    st.sampled_from([0, 1]),
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.sampled_from([1, 2, 4, 8]),
)
@settings(max_examples=400, deadline=None)
def test_shards_of_scales_lie_beside_the_shards_of_elements(sizes, others, dim, training, generation):
    """Any units and layouts, any block that fits. Would not catch a block that rules ought to refuse and do not."""
    shapes = [(units, (units * size, others) if dim == 0 else (others, units * size)) for units, size in sizes]
    tensor = LogicalTensor("w", tuple(Segment(str(i), shape, units) for i, (units, shape) in enumerate(shapes)), dim)
    try:
        extent = common_extent([tensor], [Place(0, training, 1), Place(0, generation, 1)])
    except ValueError:
        return
    for block in (block for block in range(1, extent + 1) if extent % block == 0):
        scales = scales_of(tensor, block)
        for place in (*places(training), *places(generation)):
            assert shard_of(scales, place) == scales_shard(shard_of(tensor, place), block)
