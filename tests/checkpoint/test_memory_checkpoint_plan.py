"""Which files a step's copy has, which rank of another node gets them, and what is read from them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.checkpoint.memory_checkpoint_plan import (
    PARTS,
    CopyFile,
    SavedBox,
    files_of,
    is_whole,
    reads_of,
    receivers,
    transfers,
)
from megatron_rl.parallel.sharding import box_numel, intersect

POOLS = st.sampled_from(["global_pool", "a-b", "x.y/z", "critic.unfinished"])


@given(st.integers(0, 9), st.integers(0, 10**6), POOLS, st.integers(0, 10**5), st.sampled_from(PARTS))
def test_names_are_read_back_on_their_own_node(attempt, step, pool, rank, part) -> None:
    file = CopyFile(attempt, step, pool, rank, part)
    name = file.name("node a")
    assert "/" not in name
    assert files_of([name, f"{name}.crc32", f"{name}.unfinished", "other"], "node a") == [file]
    assert files_of([name], "node b") == []


def test_a_step_is_whole_with_every_file_of_every_rank() -> None:
    files = [
        CopyFile(1, 5, pool, rank, part)
        for pool, size in (("a", 2), ("b", 1))
        for rank in range(size)
        for part in PARTS
    ]
    assert is_whole(files, 1, 5, {"a": 2, "b": 1})
    assert not is_whole(files[1:], 1, 5, {"a": 2, "b": 1})
    assert not is_whole(files, 0, 5, {"a": 2, "b": 1}) and not is_whole(files, 1, 4, {"a": 2, "b": 1})


def test_the_next_node_keeps_a_copy() -> None:
    assert receivers(["a", "a"]) == [None, None]
    assert receivers(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert receivers(["a", "b", "c"]) == [1, 2, 0]
    assert receivers(["a", "a", "a", "b"]) == [3, 3, 3, 0]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_every_copy_is_on_two_nodes_where_there_are_two(nodes) -> None:
    targets = receivers(nodes)
    for rank, target in enumerate(targets):
        if len(set(nodes)) == 1:
            assert target is None
        else:
            assert target is not None and nodes[target] != nodes[rank]


@st.composite
def cuts(draw, most: int = 12):
    """Cut points of [0, most), both ends included."""
    inner = draw(st.sets(st.integers(1, most - 1), max_size=4))
    return sorted({0, most, *inner})


def boxes(rows: list[int], columns: list[int], key: str) -> list[SavedBox]:
    return [
        SavedBox("actor", key, ((low, high), (left, right)))
        for low, high in zip(rows, rows[1:], strict=False)
        for left, right in zip(columns, columns[1:], strict=False)
    ]


@given(cuts(), cuts(), cuts(), cuts(), st.integers(1, 3), st.data())
def test_any_cut_is_read_from_any_other(rows, columns, other_rows, other_columns, num_files, data) -> None:
    """Every element of every wanted box is read once; with a file less, exactly the boxes it touched are lacking."""
    saved = boxes(rows, columns, "w")
    files: list[list[SavedBox]] = [[] for _ in range(num_files)]
    for box in saved:
        files[data.draw(st.integers(0, num_files - 1))].append(box)
    wanted = boxes(other_rows, other_columns, "w")
    reads, lacking = reads_of(wanted, files)
    assert lacking == []
    for want in wanted:
        elements = [box_numel(read.box) for read in reads if read.wanted == want]
        assert sum(elements) == box_numel(want.box)
    for read in reads:
        assert read.saved in files[read.file] and intersect(read.saved.box, read.wanted.box) == read.box
    _, lacking = reads_of(wanted, [[], *files[1:]])
    touched = [want for want in wanted if any(intersect(want.box, box.box) for box in files[0])]
    assert lacking == touched
    assert reads_of(boxes([0, 1], [0, 1], "other"), files)[1] == boxes([0, 1], [0, 1], "other")


def test_names_of_boxes_are_read_back() -> None:
    for box in (((2, 5), (0, 3)), ((7, 8),), ()):
        saved = SavedBox("critic", "optimizer.state.exp_avg.a.weight", box)
        assert SavedBox.of(saved.name, [high - low for low, high in box]) == saved


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.data())
def test_each_node_gets_what_its_ranks_want_once(nodes, data) -> None:
    files = [CopyFile(0, 1, "p", rank, PARTS[0]) for rank in range(4)]
    held: dict[str, list[CopyFile]] = {node: [] for node in nodes}
    for file in files:
        for node in data.draw(st.sets(st.sampled_from(nodes), min_size=1)):
            held[node].append(file)
    wanted = [data.draw(st.sets(st.sampled_from(files))) for _ in nodes]
    moves = transfers(wanted, nodes, held)
    assert len({(file, nodes[target]) for file, _, target in moves}) == len(moves)
    for file, source, target in moves:
        assert file in held[nodes[source]] and file not in held[nodes[target]]
        assert any(file in wanted[rank] for rank, node in enumerate(nodes) if node == nodes[target])
    for rank, node in enumerate(nodes):
        there = {*held[node], *(file for file, _, target in moves if nodes[target] == node)}
        assert wanted[rank] <= there
