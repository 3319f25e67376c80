"""Sequences of a micro-batch laid as a trie: tokens that several begin with alike are computed once.

A sequence is a conversation of a row: several responses to a prompt, the branches of an episode, and rows that happen
to begin alike share what they have in common, sampled tokens too. In the order of their tokens, each sequence shares
most with the one before it. The columns of a block are the nodes of the trie: of every sequence the tokens that it does
not share, end to end. Losses and columns stay those of the rows: a token of a row is read from its node. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rl.experience.recorded_experts import expert_bytes
from megatron_rl.records import Batch, image_bytes

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class PrefixTree:
    """How the sequences of a block lie. Legend: T tokens and N sampled tokens of its rows, row after row; S columns;
    M pairs of a column and the token that follows it in a sequence, each once.

    columns: int64 [T], the column of every token, on the CPU. segments: tokens of every sequence that has any of its
    own, adding up to S. prefix_sizes, prefix_columns: of the segments, int64 [segments] how many tokens come before,
    and the columns of these, end to end; on the CPU.
    places, targets: int64 [M], a column where a sampled token is predicted, and that token. pair_of_token: int64 [N].
    token_of_pair: int64 [M], the first of the N tokens of each pair.
    """

    columns: Tensor
    segments: tuple[int, ...]
    prefix_sizes: Tensor
    prefix_columns: Tensor
    places: Tensor
    targets: Tensor
    pair_of_token: Tensor
    token_of_pair: Tensor

    def whole(self, values: Tensor) -> Tensor:
        """values [M, ...] of the pairs -> [N, ...] of the sampled tokens; gradients of a pair's tokens add up."""
        return values.index_select(0, self.pair_of_token)

    def part(self, values: Tensor) -> Tensor:
        """values [N, ...] of the sampled tokens -> [M, ...], those of the first token of each pair."""
        return values.index_select(0, self.token_of_pair)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a pass reads on the device next to `places`, by name."""
        return {name: getattr(self, name) for name in ("targets", "pair_of_token", "token_of_pair")}

    def with_tensors(self, moved: Mapping[str, Tensor]) -> PrefixTree:
        """Return the tree with other tensors in place of those that `tensors` has."""
        changed: dict[str, Any] = dict(moved)
        return replace(self, **changed)


def prefix_tree(tokens: Tensor, sampled: Tensor, lengths: Tensor, others: Tensor | None = None) -> PrefixTree:
    """Lay sequences of these lengths, whose tokens [T] lie end to end. sampled: bool [T], never a sequence's first.

    others: as `keys_of` takes them.
    """
    ids, long = tokens.numpy(), lengths.numpy()
    columns, order, shared = nodes_of(keys_of(tokens, others), long)
    own = long[order] - shared
    has_own = own > 0
    starts = np.cumsum(long) - long
    befores = [
        columns[starts[row] : starts[row] + num] for row, num in zip(order[has_own], shared[has_own], strict=True)
    ]
    taken = np.flatnonzero(sampled.numpy())
    places, targets = columns[taken - 1], ids[taken]
    pairs, first, pair_of_token = np.unique(np.stack([places, targets]), axis=1, return_index=True, return_inverse=True)
    return PrefixTree(
        torch.from_numpy(columns),
        tuple(own[has_own].tolist()),
        torch.from_numpy(shared[has_own]),
        torch.from_numpy(np.concatenate([*befores, np.zeros(0, np.int64)])),
        *(torch.from_numpy(np.ascontiguousarray(part)) for part in (*pairs, pair_of_token.reshape(-1), first)),
    )


def other_bytes(batch: Batch, rows: Sequence[int]) -> Tensor | None:
    """uint8 [tokens of these rows, n]: what tells tokens apart in addition to their ids, the experts that they are sent
    to and their images; None where ids alone do.
    """
    parts = [expert_bytes(batch, rows)] if "routed_experts" in batch else []
    if "image_pieces" in batch:
        parts.append(image_bytes(batch, torch.tensor(list(rows))))
    return torch.cat(parts, 1) if parts else None


def keys_of(tokens: Tensor, others: Tensor | None = None) -> NDArray[np.uint8]:
    """uint8 [T, n]: two tokens have the same bytes if they have the same ids and the same `others` (uint8 [T, n])."""
    ids = tokens.numpy().astype(">u4").view(np.uint8).reshape(len(tokens), 4)
    return ids if others is None else np.concatenate([ids, others.numpy().reshape(len(tokens), -1)], 1)


def nodes_of(keys: NDArray[np.uint8], lengths: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """(node of every token [T], sequences in the order of their keys [n], tokens that each of these, in this order,
    shares with the sequence before it [n]).

    Nodes are numbered by the order of sequences, and of their own tokens.
    """
    ends = np.cumsum(lengths)
    starts = ends - lengths
    parts = [keys[start:end] for start, end in zip(starts, ends, strict=True)]
    order = np.array(sorted(range(len(parts)), key=lambda number: parts[number].tobytes()), np.int64)
    shared = np.zeros(len(parts), np.int64)
    for at, (one, other) in enumerate(pairwise(order), start=1):
        shared[at] = num_common(parts[one], parts[other])
    nodes = np.empty(len(keys), np.int64)
    num_nodes, before = 0, 0
    for number, num_shared in zip(order, shared, strict=True):
        start, end = starts[number], ends[number]
        nodes[start : start + num_shared] = nodes[before : before + num_shared]
        nodes[start + num_shared : end] = np.arange(num_nodes, num_nodes + lengths[number] - num_shared)
        num_nodes, before = num_nodes + lengths[number] - num_shared, start
    return nodes, order, shared


def num_common(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> int:
    """How many rows two arrays begin with alike."""
    num = min(len(one), len(other))
    differs = (one[:num] != other[:num]).any(1)
    return int(differs.argmax()) if differs.any() else num


def tree_plan(
    nodes: Sequence[Numbers], order: Sequence[int], max_tokens: int, num_blocks: int = 1, multiple: int = 1
) -> list[list[int]]:
    """Rows of each block, every row once: as few blocks of about equal size as have at most `max_tokens` nodes each.

    nodes: row -> the nodes of its tokens, in a tree of all rows. order: rows, those that share most next to each other.
    num_blocks: the least number; multiple: divides the number, as far as there are rows. A row of more nodes than
    `max_tokens` has a block of its own.
    """
    cuts = [np.unique(row) for row in nodes]
    size = 1 + max((int(row[-1]) for row in cuts if len(row)), default=0)
    blocks = _walk(cuts, order, size, max_tokens)
    wanted = min(len(cuts), -(-max(len(blocks), num_blocks) // multiple) * multiple)
    low, high = 1, max_tokens  # the smallest limit with which the blocks are enough
    while low < high:
        middle = (low + high) // 2
        if len(_walk(cuts, order, size, middle)) <= wanted:
            high = middle
        else:
            low = middle + 1
    blocks = _walk(cuts, order, size, low)
    while len(blocks) < wanted:
        longest = max(range(len(blocks)), key=lambda block: len(blocks[block]))
        half = len(blocks[longest]) // 2
        blocks[longest : longest + 1] = [blocks[longest][:half], blocks[longest][half:]]
    return blocks


def _walk(cuts: Sequence[Numbers], order: Sequence[int], size: int, limit: int) -> list[list[int]]:
    """Blocks of neighbours, each as long as its nodes are at most `limit`."""
    blocks: list[list[int]] = []
    taken, num = np.zeros(size, bool), 0
    for row in order:
        more = int((~taken[cuts[row]]).sum())
        if not blocks or num + more > limit:
            blocks.append([])
            taken[:], num, more = False, 0, len(cuts[row])
        blocks[-1].append(row)
        taken[cuts[row]] = True
        num += more
    return blocks
