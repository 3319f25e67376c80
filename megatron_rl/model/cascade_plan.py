"""Which keys of a packed row are met once, by all segments that have them in their prefixes (cascade attention).

Columns that the same neighbouring segments have in their prefixes are a shared piece. All columns of these segments see
all of it, so it is one block without a mask. A block has a price: a call, and one more output of each query to merge.
So short pieces and those of few segments stay in the slots of each segment (`segments.py`). Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.int64]

CALL_PAIRS = 15000
"""What a block costs next to its products, in products of a query with a key; measured by scripts/bench/trees.py."""
MERGE_PAIRS = 40
"""What it costs to merge the output of a query, in products."""
SLOT_PAIRS = 80
"""What it costs to copy a token into a slot, and its gradients back, in products."""


class SharedPiece(NamedTuple):
    """Columns of keys, and the columns of the queries that see all of them, as (first, end); and to how many segments
    these belong.
    """

    keys: tuple[int, int]
    queries: tuple[int, int]
    num_segments: int

    @property
    def is_worth_a_block(self) -> bool:
        """Whether a block costs less than the piece in the slots of every segment, whose queries and keys are all
        multiplied: torch's kernel on the CPU masks what is later, and leaves out little.
        """
        num_keys, num_queries = (end - first for first, end in (self.keys, self.queries))
        in_slots = num_keys * (2 * num_queries + self.num_segments * (num_keys + SLOT_PAIRS))
        return in_slots > CALL_PAIRS + (num_keys + MERGE_PAIRS) * num_queries


def shared_pieces(lengths: Numbers, num_before: Numbers, before: Numbers) -> list[SharedPiece]:
    """Return the pieces of a row, in the order of their keys.

    lengths: of the segments, end to end. num_before: tokens of each segment's prefix. before: the columns of these, end
    to end. Columns whose segments do not follow upon their own, side by side, are in no piece.
    """
    ends = np.cumsum(lengths)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    readers = np.repeat(np.arange(len(lengths)), num_before)
    last, count = np.full(len(owner), -1), np.bincount(before, minlength=len(owner))
    last[before] = readers  # what is written last stays
    columns = np.flatnonzero((count > 0) & (count == last - owner))
    if not len(columns):
        return []
    of_columns = np.stack([owner[columns], last[columns], columns - np.arange(len(columns))])
    parts = np.split(columns, np.flatnonzero((np.diff(of_columns) != 0).any(0)) + 1)
    pieces = []
    for first, end in ((int(part[0]), int(part[-1]) + 1) for part in parts):
        is_cut = end < ends[owner[first]]
        pieces.append(SharedPiece((first, end), (end, int(ends[last[first]])), int(count[first] + is_cut)))
    return pieces


class SlotPlan(NamedTuple):
    """What stands in slots: lengths of segments, end to end; int64 [segments], tokens that come before each in its
    slots; and the columns of these, end to end.
    """

    lengths: Sequence[int]
    num_before: Tensor
    before: Tensor


def cut_prefixes(
    plan: SlotPlan, is_worth: Callable[[SharedPiece], bool] = lambda piece: piece.is_worth_a_block
) -> tuple[tuple[SharedPiece, ...], SlotPlan]:
    """(the pieces that are blocks, what is left for slots): a segment ends where a piece of its own does."""
    lengths, num_before, before = np.array(plan.lengths, np.int64), plan.num_before.numpy(), plan.before.numpy()
    pieces = [piece for piece in shared_pieces(lengths, num_before, before) if is_worth(piece)]
    if not pieces:
        return (), plan
    is_shared = np.zeros(int(lengths.sum()), bool)
    for piece in pieces:
        is_shared[slice(*piece.keys)] = True
    ends, before_ends = np.cumsum(lengths), np.cumsum(num_before)
    cuts = np.array(sorted(piece.keys[1] for piece in pieces))
    sizes, parts = [], []
    for length, end, num, before_end in zip(lengths, ends, num_before, before_ends, strict=True):
        start = int(end - length)
        whole = np.concatenate([before[before_end - num : before_end], np.arange(start, end)])
        inner = cuts[np.searchsorted(cuts, start, "right") : np.searchsorted(cuts, end)]
        bounds = [start, *inner.tolist(), int(end)]
        for first, stop in pairwise(bounds):
            sizes.append(stop - first)
            earlier = whole[: num + first - start]
            parts.append(earlier[~is_shared[earlier]])
    counts = torch.tensor([len(part) for part in parts])
    return tuple(pieces), SlotPlan(sizes, counts, torch.from_numpy(np.concatenate(parts)))
