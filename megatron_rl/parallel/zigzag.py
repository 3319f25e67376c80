"""The tokens of every sequence that a context-parallel rank reads: index arithmetic, and the sum that undoes it.

A segment is cut into 2 * cp_size chunks of equal length. Rank r reads chunks r and 2 * cp_size - 1 - r:

    cp_size 2:  chunks 0 1 2 3  ->  rank 0: 0, 3   rank 1: 1, 2

Under a causal mask the cost of a chunk grows with the tokens before it, so both ranks have the same work in every
segment. A rank's two chunks of one segment are adjacent, the earlier one first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def chunks_of(cp_rank: int, cp_size: int) -> tuple[int, int]:
    """The two chunks of every segment that a rank reads, in order."""
    return cp_rank, 2 * cp_size - 1 - cp_rank


def segment_multiple(cp_size: int) -> int:
    """The length of every segment must be a multiple of this."""
    return 2 * cp_size if cp_size > 1 else 1


def zigzag_columns(lengths: Sequence[int], cp_size: int, cp_rank: int) -> Tensor:
    """The columns that a rank reads of segments of these lengths end to end: int64 [sum(lengths) / cp_size].

    Raises ValueError for a length that is no multiple of 2 * cp_size.
    """
    uneven = [length for length in lengths if length % (2 * cp_size)]
    if uneven:
        raise ValueError(f"segments of {uneven} tokens are no multiple of 2 * cp({cp_size})")
    sizes = torch.tensor(lengths, dtype=torch.int64)
    chunks = sizes // (2 * cp_size)
    starts = sizes.cumsum(0) - sizes
    # Two pieces for each segment: where they begin, and how long each is.
    first, second = (starts + chunk * chunks for chunk in chunks_of(cp_rank, cp_size))
    begins, long = torch.stack([first, second], 1).flatten(), chunks.repeat_interleave(2)
    shift = begins - (long.cumsum(0) - long)
    return torch.arange(int(long.sum())) + shift.repeat_interleave(long)


def chunk_ranges(num_columns: int, cp_size: int, cp_rank: int) -> tuple[tuple[int, int], ...]:
    """The columns of the chunks that a rank reads of one segment, as (first, end); cp_size 1: all of it."""
    if cp_size == 1:
        return ((0, num_columns),)
    long = num_columns // (2 * cp_size)
    return tuple((chunk * long, (chunk + 1) * long) for chunk in chunks_of(cp_rank, cp_size))


@dataclass(frozen=True)
class ContextShare:
    """A context-parallel rank's part of one block. Legend: b x S the whole block, N its sampled tokens, n those here.

    In a trie these are pairs of a column and the token that follows it.
    columns: int64 [S / cp_size], the columns that this rank reads of every row; host_columns: the same on the CPU,
    also when the others are on a device. places: int64 [n], where among the b x S / cp_size that it reads a sampled
    token is predicted. numbers: int64 [n], numbers of these tokens among the N.
    """

    columns: Tensor
    host_columns: Tensor
    places: Tensor
    numbers: Tensor
    num_scored: int
    group: dist.ProcessGroup

    @classmethod
    def of(cls, columns: Tensor, predicts_sampled: Tensor, group: dist.ProcessGroup) -> ContextShare:
        """predicts_sampled: bool [b, S - 1] of the whole block. Both tensors are on the CPU."""
        whole = torch.nn.functional.pad(predicts_sampled, (0, 1))
        scored = whole[:, columns]
        numbers = (whole.flatten().cumsum(0) - 1).view_as(whole)[:, columns][scored]
        return cls(columns, columns, scored.flatten().nonzero()[:, 0], numbers, int(whole.sum()), group)

    @classmethod
    def of_places(cls, columns: Tensor, places: Tensor, group: dist.ProcessGroup) -> ContextShare:
        """places: int64 [N], where the sampled tokens are predicted, among the columns of one row. All on the CPU."""
        here = torch.full((int(columns.max()) * group.size() + 1,), -1)
        here[columns] = torch.arange(len(columns))
        mine = here[places]
        numbers = (mine >= 0).nonzero()[:, 0]
        return cls(columns, columns, mine[numbers], numbers, len(places), group)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a pass reads on the device, by name."""
        return {"columns": self.columns, "places": self.places, "numbers": self.numbers}

    def here(self, places: Tensor, num_columns: int) -> Tensor:
        """places int64 [N] among the b x S of the whole block, or -1 -> among what this rank reads; -1 elsewhere.

        num_columns: S. All on the CPU.
        """
        column_here = torch.full((num_columns,), -1)
        column_here[self.host_columns] = torch.arange(len(self.host_columns))
        row, column = places // num_columns, column_here[places % num_columns]
        return torch.where((places >= 0) & (column >= 0), row * len(self.host_columns) + column, -1)

    def whole(self, values: Tensor) -> Tensor:
        """values [n, ...] of the tokens here -> [N, ...] of all; all ranks of the group must call."""
        whole: Tensor = Whole.apply(values, self)
        return whole

    def total(self, value: Tensor) -> Tensor:
        """The sum of a scalar over the ranks of the group, which all must call; a rank's gradient is its own."""
        total: Tensor = Total.apply(value, self)
        return total


class Total(torch.autograd.Function):
    """Sum a scalar over ranks. Every rank computes the whole loss from the sum, so backward passes the gradient
    unchanged.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, share: ContextShare) -> Tensor:
        total = value.clone()
        dist.all_reduce(total, group=share.group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Whole(torch.autograd.Function):
    """values [n, ...] of every rank's own tokens -> [N, ...], the same on all ranks of the group.

    Every rank computes the whole loss from them, so backward takes the own rank's gradient of a token and does not sum.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, share: ContextShare) -> Tensor:
        ctx.numbers = share.numbers
        whole = values.new_zeros(share.num_scored, *values.shape[1:])
        whole[share.numbers] = values
        dist.all_reduce(whole, group=share.group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.numbers], None
