"""Sequences laid as a trie: a small one by hand, and any by the properties that passes rely on."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.experience.block_layout import laid_as_tree
from megatron_rl.experience.micro_batches import micro_batches
from megatron_rl.experience.prefix_tree import keys_of, nodes_of, num_common, other_bytes, prefix_tree, tree_plan
from megatron_rl.images import ImagePiece, digest_of_image
from megatron_rl.model.segments import Segments
from megatron_rl.records import prompt_numbers, ragged, ragged_from_lengths, single_turn

SEQUENCES = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), min_size=1, max_size=9)


def tree_of(rows: list[list[int]], sampled: list[list[bool]] | None = None):
    """The tree of rows whose tokens, but for the first ones, are sampled unless a mask says otherwise."""
    masks = sampled or [[place > 0 for place in range(len(row))] for row in rows]
    flat = [torch.tensor([value for row in of for value in row]) for of in (rows, masks)]
    return prefix_tree(*flat, torch.tensor([len(row) for row in rows]))


def test_a_small_tree_by_hand() -> None:
    """1 2 3, then 1 2 4 5, then 1 2: the second shares two tokens, the third has none of its own. Sorted, the third is
    first.
    """
    tree = tree_of([[1, 2, 3], [1, 2, 4, 5], [1, 2]], [[False, True, True], [False, False, True, True], [False, True]])
    assert tree.columns.tolist() == [0, 1, 2, 0, 1, 3, 4, 0, 1]
    assert tree.segments == (2, 1, 2)
    assert tree.prefix_sizes.tolist() == [0, 2, 2] and tree.prefix_columns.tolist() == [0, 1, 0, 1]
    # Column 0 predicts 2 for two rows; column 1 predicts 3 and 4.
    assert tree.places.tolist() == [0, 1, 1, 3] and tree.targets.tolist() == [2, 3, 4, 5]
    assert tree.pair_of_token.tolist() == [0, 1, 2, 3, 0] and tree.token_of_pair.tolist() == [0, 1, 2, 3]
    assert tree.whole(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [1, 2, 3, 4, 1]
    assert tree.part(torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0])).tolist() == [1, 2, 3, 4]


def test_tokens_with_other_experts_are_others() -> None:
    tokens, lengths = torch.tensor([1, 2, 1, 2]), torch.tensor([2, 2])
    experts = torch.tensor([[0, 1], [2, 3], [0, 1], [3, 2]], dtype=torch.uint8)
    sampled = torch.tensor([False, True, False, True])
    assert prefix_tree(tokens, sampled, lengths).segments == (2,)
    assert prefix_tree(tokens, sampled, lengths, experts).segments == (2, 1)


def test_equal_ids_of_different_images_share_nothing() -> None:
    """Three rows of equal ids, of which the first and the last show one image and the second another: prompts, nodes of
    all rows and those of a block. Would not catch features of the wrong image.
    """
    one, other = (digest_of_image(patches, (1, 4, 2)) for patches in (b"red", b"blue"))
    pieces = [ImagePiece(1, digest, (1, 4, 2), 2).numbers for digest in (one, other, one)]
    rows = single_turn(ragged([torch.tensor([5, 9, 9, 6, 7])] * 3), torch.tensor([1, 1, 1]))
    assert prompt_numbers(rows) == [0, 0, 0]
    rows.add(image_pieces=ragged_from_lengths(torch.tensor(pieces), torch.tensor([1, 1, 1])))
    assert prompt_numbers(rows) == [0, 1, 0]
    assert other_bytes(rows, [1]).tolist() == [[0] * 16, *[[*bytes.fromhex(other)]] * 2, [0] * 16, [0] * 16]
    (block,) = micro_batches(rows, [[0, 1, 2]], True, as_tree=True)
    assert sorted(block.segments) == [4, 5] and block.tree.columns[5:10].tolist() != block.tree.columns[:5].tolist()
    assert block.tree.columns[10:].tolist() == block.tree.columns[:5].tolist()
    (block,) = micro_batches(rows, [[0, 1, 2]], True, prompts=prompt_numbers(rows))
    assert block.segments == (5, 5, 2) and block.prefixes == ((0, 0), (0, 0), (0, 3))
    nodes, _, _ = nodes_of(keys_of(rows.flat("input_ids"), other_bytes(rows, range(3))), np.array([5, 5, 5]))
    assert len({*nodes.tolist()}) == 9


@given(SEQUENCES)
def test_every_node_once_and_every_sequence_whole(rows: list[list[int]]) -> None:
    """As many columns as the trie has nodes; a segment after its prefix reads a sequence's beginning; every sampled
    token is predicted in the column of the token before it.
    """
    tree = tree_of(rows)
    num_nodes = len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})
    assert sum(tree.segments) == num_nodes
    tokens = torch.tensor([token for row in rows for token in row])
    input_ids, segments = laid_as_tree(tokens, tree, 4)
    assert input_ids.shape[1] % 4 == 0 and segments[: len(tree.segments)] == tree.segments
    read = tree.columns.split([len(row) for row in rows])
    assert [input_ids[0, columns].tolist() for columns in read] == rows
    before, own, column = tree.prefix_columns.split(tree.prefix_sizes.tolist()), [], 0
    for size, prefix in zip(tree.segments, before, strict=True):
        path = [*prefix.tolist(), *range(column, column + size)]
        assert path in [columns[: len(path)].tolist() for columns in read]
        own.append(path)
        column += size
    pairs = torch.stack([tree.places, tree.targets])[:, tree.pair_of_token]
    wanted = [
        (int(columns[t - 1]), row[t]) for row, columns in zip(rows, read, strict=True) for t in range(1, len(row))
    ]
    assert list(map(tuple, pairs.T.tolist())) == wanted


@given(SEQUENCES)
def test_slots_hold_whole_paths(rows: list[list[int]]) -> None:
    """The slots of a segment read its prefix and then its own columns; a token is read from its own segment's slot."""
    tree = tree_of(rows)
    segments = Segments.on_host(tree.segments, (tree.prefix_sizes, tree.prefix_columns))
    num_columns = sum(tree.segments)
    assert segments.token_of_slot[segments.slot_of_token].tolist() == list(range(num_columns))
    ends = np.cumsum(tree.segments)
    before = tree.prefix_columns.split(tree.prefix_sizes.tolist())
    wanted = sorted(
        [*prefix.tolist(), *range(end - size, end)]
        for prefix, size, end in zip(before, tree.segments, ends, strict=True)
    )
    found = sorted(row[: len(path)] for row, path in matched(padded_slots(segments), wanted))
    assert found == wanted


def padded_slots(segments: Segments) -> list[list[int]]:
    """The tokens in the slots of each segment, filler included."""
    rows, start = [], 0
    for count, width in segments.shapes:
        rows += segments.token_of_slot[start : start + count * width].view(count, width).tolist()
        start += count * width
    return rows


def matched(rows: list[list[int]], paths: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Each path with the row of slots that begins with it."""
    return [(next(row for row in rows if row[: len(path)] == path), path) for path in paths]


@given(SEQUENCES, st.integers(1, 20), st.integers(1, 4), st.integers(1, 3))
def test_blocks_hold_few_nodes_and_every_row(rows: list[list[int]], most: int, num: int, multiple: int) -> None:
    """Every row once; at most `most` nodes, or a row alone; a multiple of blocks as far as there are rows."""
    tokens = torch.tensor([token for row in rows for token in row])
    lengths = np.array([len(row) for row in rows])
    nodes, order, _ = nodes_of(keys_of(tokens), lengths)
    of_rows = np.split(nodes, np.cumsum(lengths)[:-1])
    blocks = tree_plan(of_rows, order.tolist(), most, num, multiple)
    assert sorted(row for block in blocks for row in block) == list(range(len(rows)))
    for block in blocks:
        assert block and (len(block) == 1 or len(np.unique(np.concatenate([of_rows[row] for row in block]))) <= most)
    assert len(blocks) >= min(num, len(rows))
    assert len(blocks) % multiple == 0 or len(blocks) == len(rows)


def test_common_beginnings() -> None:
    one, other = (keys_of(torch.tensor(row)) for row in ([1, 2, 3], [1, 2, 4, 5]))
    assert (num_common(one, other), num_common(one, one[:1]), num_common(one, one)) == (2, 1, 3)
