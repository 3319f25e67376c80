"""The arithmetic of training and rollout grids."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid

modest = settings(max_examples=60, deadline=None)


@st.composite
def rollout_grids(draw):
    rollout_tp, micro_dp = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    tp_size, pp_size, dp_size = rollout_tp * micro_dp, draw(st.integers(1, 3)), draw(st.integers(1, 3))
    cp_size = draw(st.integers(1, 3))
    world_size = tp_size * cp_size * pp_size * dp_size
    return RolloutGrid(TrainGrid(world_size, tp_size, pp_size, cp_size=cp_size), rollout_tp)


def test_tp4_to_tp2():
    """The design's example. Would not catch errors that need more than one training TP group."""
    grid = RolloutGrid(TrainGrid(world_size=4, tp_size=4, pp_size=1), tp_size=2)
    assert grid.micro_dp_size == 2 and grid.num_replicas == 2
    assert grid.micro_dp_groups() == [[0, 1], [2, 3]]
    assert grid.tp_groups() == [[0, 2], [1, 3]]
    assert [grid.replica(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [grid.tp_rank(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_tp2_pp2():
    """Pipeline stages become replicas. Would not catch a wrong order of dp and pp, as dp is 1."""
    train = TrainGrid(world_size=4, tp_size=2, pp_size=2)
    assert train.tp_groups() == [[0, 1], [2, 3]]
    assert train.pp_groups() == [[0, 2], [1, 3]]
    assert train.dp_groups() == [[0], [1], [2], [3]]
    assert RolloutGrid(train, 2).tp_groups() == [[0, 1], [2, 3]]
    assert RolloutGrid(train, 2).num_replicas == 2
    assert RolloutGrid(train, 1).tp_groups() == [[0], [1], [2], [3]]
    assert RolloutGrid(train, 1).micro_dp_groups() == [[0, 1], [2, 3]]


def test_dp_varies_faster_than_pp():
    """Megatron's order on TP2 PP2 DP2. Would not catch a wrong place of context parallelism; the next one does."""
    train = TrainGrid(world_size=8, tp_size=2, pp_size=2)
    assert train.dp_size == 2
    assert train.tp_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert train.dp_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert train.pp_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [(train.tp_rank(r), train.dp_rank(r), train.pp_rank(r)) for r in (3, 4)] == [(1, 1, 0), (0, 0, 1)]


def test_cp_varies_faster_than_dp():
    """Megatron's order on TP2 CP2 DP2 PP2, and what counts as replicas: weights' groups are those without CP.

    Would not catch what only three of an axis show.
    """
    train, without = TrainGrid(16, 2, 2, cp_size=2), TrainGrid(16, 2, 2)
    assert (train.dp_size, train.num_replicas, without.dp_size, without.num_replicas) == (2, 4, 4, 4)
    assert train.cp_groups()[:2] == [[0, 2], [1, 3]] and train.cp_groups()[-1] == [13, 15]
    assert train.dp_groups()[:3] == [[0, 4], [1, 5], [2, 6]] and train.pp_groups() == without.pp_groups()
    assert train.exchange_groups() == without.exchange_groups() == [[i, i + 1, i + 8, i + 9] for i in (0, 2, 4, 6)]
    assert [train.place(rank, 64) for rank in range(16)] == [without.place(rank, 64) for rank in range(16)]
    assert not TrainGrid(4, 1, 1, ep_size=2, cp_size=2).experts_join_dp_ranks
    assert TrainGrid(4, 1, 1, ep_size=4, cp_size=2).experts_join_dp_ranks


def test_tp8_pp4_dp2_on_64_ranks():
    """Counts and chosen groups, generating with TP4 and TP8. Would not catch a wrong group in the middle."""
    train = TrainGrid(world_size=64, tp_size=8, pp_size=4)
    assert (train.dp_size, len(train.tp_groups()), len(train.dp_groups()), len(train.pp_groups())) == (2, 8, 32, 16)
    assert train.dp_groups()[0] == [0, 8] and train.dp_groups()[-1] == [55, 63]
    assert train.pp_groups()[0] == [0, 16, 32, 48] and train.pp_groups()[8] == [8, 24, 40, 56]

    four, eight = RolloutGrid(train, 4), RolloutGrid(train, 8)
    assert (four.num_replicas, four.micro_dp_size, len(four.micro_dp_groups())) == (16, 2, 32)
    assert four.tp_groups()[:3] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14]]
    assert four.micro_dp_groups()[:2] == [[0, 1], [2, 3]] and four.micro_dp_groups()[-1] == [62, 63]
    assert (four.replica(13), four.tp_rank(13)) == (3, 2)
    assert (eight.num_replicas, eight.micro_dp_size) == (8, 1)
    assert eight.tp_groups() == train.tp_groups()


@pytest.mark.parametrize(
    ("world_size", "tp_size", "ep_size", "etp_size", "joined"),
    [(4, 2, 1, None, False), (4, 2, 2, 1, False), (4, 4, 2, 1, False), (4, 1, 2, 1, True), (4, 2, 2, 2, True)],
)
def test_experts_of_other_data_parallel_ranks(world_size, tp_size, ep_size, etp_size, joined):
    """Inside one TP group, or over several. Would not catch a pass that is short of rows on every rank."""
    assert TrainGrid(world_size, tp_size, 1, ep_size, etp_size).experts_join_dp_ranks is joined


@pytest.mark.parametrize(
    ("train", "rollout", "kept"),
    [
        # Experts dealt out as in training: everything is kept.
        ((2, 2, 1, 2, 1), (2, 2), [Fraction(1, 2)] * 2),
        # Columns of all experts in training: half of them are wanted.
        ((2, 2, 1, 1, 2), (2, 2), [Fraction(1, 4)] * 2),
        # A quarter of the experts on each rank, inside of the rank's half or not.
        ((4, 1, 1, 4, 1), (2, 2), [Fraction(1, 4), 0, 0, Fraction(1, 4)]),
        # TP4 of strided groups: ranks 0 and 1 want the first half.
        ((4, 4, 1, 4, 1), (2, 2), [Fraction(1, 4)] * 4),
        # Whole experts in training, columns of all in generation.
        ((2, 2, 1, 2, 1), (2, 1), [Fraction(1, 4)] * 2),
        # Attention DP: experts over two TP groups as over training's DP ranks, and over the ranks of training TP4.
        ((2, 1, 1, 2, 1), (1, 2, 2), [Fraction(1, 2)] * 2),
        ((4, 4, 1, 4, 1), (1, 4, 4), [Fraction(1, 4)] * 4),
    ],
)
def test_experts_that_stay(train, rollout, kept):
    """Shares of a stage's experts by hand; training is (ranks, TP, PP, EP, ETP). Would not catch a plan that fetches
    them all the same.
    """
    grid = RolloutGrid(TrainGrid(*train), *rollout)
    assert [grid.kept_share(rank, of_experts=True) for rank in range(train[0])] == kept
    assert grid.contains_training == all(share == Fraction(1, train[3] * train[4]) for share in kept)


def test_tp_groups_of_a_replica_share_experts():
    """TP8, replicas of two TP groups with two ranks, by hand. Would not catch groups that vLLM makes otherwise."""
    grid = RolloutGrid(TrainGrid(8, 8, 1), 2, 4, 2)
    assert grid.replicas() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert grid.tp_groups() == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert [(grid.replica(rank), grid.dp_rank(rank), grid.tp_rank(rank)) for rank in (2, 5)] == [(0, 0, 1), (1, 1, 0)]
    places = [grid.place(rank, 64) for rank in (0, 2, 4, 6)]
    assert [(place.tp_rank, place.tp_size, place.ep_rank, place.ep_size) for place in places] == [
        (0, 2, 0, 4),
        (1, 2, 1, 4),
        (0, 2, 2, 4),
        (1, 2, 3, 4),
    ]
    with pytest.raises(ValueError, match=r"rollout ep\(2\) is neither 1 nor rollout tp\(2\) \* dp\(2\)"):
        RolloutGrid(TrainGrid(8, 8, 1), 2, 2, 2)


def test_whole_experts_need_the_ranks_of_a_rollout_tp_group():
    """Ranks of a group have experts in order. Would not catch vLLM's own order."""
    grid = RolloutGrid(TrainGrid(4, 4, 1), 2, 2)
    assert [
        (place.ep_rank, place.ep_size, place.etp_size) for place in (grid.place(rank, 64) for rank in range(4))
    ] == [
        (0, 2, 1),
        (0, 2, 1),
        (1, 2, 1),
        (1, 2, 1),
    ]
    with pytest.raises(ValueError, match=r"rollout ep\(4\) is neither 1 nor rollout tp\(2\)"):
        RolloutGrid(TrainGrid(4, 4, 1), 2, 4)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (2, 3), (6, 1)])
def test_six_ranks_at_rollout_tp2_are_three_replicas(tp_size, pp_size):
    """60 prompts make 20 per replica and 240 samples at n = 12. Would not catch an unequal split."""
    grid = RolloutGrid(TrainGrid(6, tp_size, pp_size), tp_size=2)
    assert grid.num_replicas == len(grid.tp_groups()) == 3
    assert divmod(60, grid.num_replicas) == (20, 0) and divmod(60 * 12, grid.num_replicas) == (240, 0)


@modest
@given(grid=rollout_grids())
def test_every_kind_of_group_partitions_the_ranks(grid):
    """Each rank once per kind, groups ascending and of one size. Would not catch ranks in the wrong group."""
    train, k = grid.train, grid.micro_dp_size
    kinds = [
        (train.tp_groups(), train.tp_size),
        (train.dp_groups(), train.dp_size),
        (train.cp_groups(), train.cp_size),
        (train.pp_groups(), train.pp_size),
        (grid.tp_groups(), grid.tp_size),
        (grid.micro_dp_groups(), k),
    ]
    for groups, size in kinds:
        assert sorted(rank for group in groups for rank in group) == list(range(train.world_size))
        assert all(group == sorted(group) and len(group) == size for group in groups)


@modest
@given(grid=rollout_grids())
def test_coordinates_agree_with_groups(grid):
    """A rank's coordinate is its place in its group. Would not catch groups and coordinates wrong alike."""
    train = grid.train
    for rank in range(train.world_size):
        where = (train.tp_rank(rank), train.dp_rank(rank), train.pp_rank(rank), train.cp_rank(rank))
        assert train.rank(*where) == rank
    for groups, coordinate in (
        (train.tp_groups(), train.tp_rank),
        (train.dp_groups(), train.dp_rank),
        (train.cp_groups(), train.cp_rank),
        (train.pp_groups(), train.pp_rank),
        (grid.tp_groups(), grid.tp_rank),
    ):
        assert all([coordinate(rank) for rank in group] == list(range(len(group))) for group in groups)
    for replica, group in enumerate(grid.tp_groups()):
        assert [grid.replica(rank) for rank in group] == [replica] * grid.tp_size


@modest
@given(grid=rollout_grids())
def test_training_shard_lies_inside_the_rollout_shard(grid):
    """[i/t, (i+1)/t) in [j/t_g, (j+1)/t_g), and micro-DP shards tile it. Would not catch a layout within shards."""
    t, t_g = grid.train.tp_size, grid.tp_size
    for group in grid.micro_dp_groups():
        (j,) = {grid.tp_rank(rank) for rank in group}
        edges = [Fraction(grid.train.tp_rank(rank), t) for rank in group]
        assert edges == [Fraction(j, t_g) + Fraction(n, t) for n in range(len(group))]
        assert edges[-1] + Fraction(1, t) == Fraction(j + 1, t_g)


def test_errors_hold_the_numbers():
    """Sizes that do not divide. Would not catch a message that names no way out."""
    with pytest.raises(ValueError, match=r"tp\(2\) \* pp\(2\) does not divide world_size\(6\)"):
        TrainGrid(world_size=6, tp_size=2, pp_size=2)
    with pytest.raises(ValueError, match=r"tp\(2\) \* cp\(3\) \* pp\(1\)"):
        TrainGrid(world_size=8, tp_size=2, pp_size=1, cp_size=3)
    with pytest.raises(ValueError, match=r"rollout tp\(3\) does not divide world_size\(4\)"):
        RolloutGrid(TrainGrid(4, 4, 1), tp_size=3)
    with pytest.raises(ValueError, match=r"etp\(2\) \* ep\(3\) does not divide the 4 ranks of a stage"):
        TrainGrid(8, 2, 2, ep_size=3)


def test_rollout_tp_beyond_training_tp():
    """TP1 PP2 -> TP2 joins the stages; TP4 -> TP3 strides over three groups. Would not catch an unlucky order."""
    assert RolloutGrid(TrainGrid(2, 1, 2), 2).tp_groups() == [[0, 1]]
    grid = RolloutGrid(TrainGrid(12, 4, 1), 3)
    assert grid.tp_groups() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert grid.micro_dp_groups() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [(grid.replica(rank), grid.tp_rank(rank)) for rank in (5, 8)] == [(1, 1), (0, 2)]


def test_exchange_groups_hold_one_copy_of_everything():
    """Without and with experts spread over data-parallel ranks. Would not catch a group with two copies of experts."""
    assert TrainGrid(8, 2, 2).exchange_groups() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert TrainGrid(8, 2, 2, ep_size=2, etp_size=1).exchange_groups() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert TrainGrid(8, 2, 2, ep_size=2, etp_size=2).exchange_groups() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_expert_coordinates_follow_megatrons_order():
    """TP2 DP2 with EP2 ETP2 and with EP4. Would not catch a wrong place of expert data parallelism (8 ranks do)."""
    places = [TrainGrid(8, 2, 1, ep_size=2, etp_size=2).place(rank, 64) for rank in range(8)]
    assert [place.etp_rank for place in places] == [0, 1] * 4
    assert [place.ep_rank for place in places] == [0, 0, 1, 1] * 2
    places = [TrainGrid(4, 2, 1, ep_size=4, etp_size=1).place(rank, 64) for rank in range(4)]
    assert [(place.ep_rank, place.tp_rank) for place in places] == [(0, 0), (1, 1), (2, 0), (3, 1)]
