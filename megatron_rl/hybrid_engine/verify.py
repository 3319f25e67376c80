"""Checksums of every moved piece of every tensor, at its owner and where it arrived.

The checksum of a piece with rows w_r of 64-bit words is  sum_r (r + 1) * sum(w_r)  mod 2^64. A changed bit always
changes it, and so do missing, exchanged or shifted rows; a permutation within one row does not. It is independent of
the path a piece took, but owner and receiver use the same layout: a layout that is wrong on both sides is found by the
comparison of log-probs, not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.hybrid_engine.exchange import region_view
from megatron_rl.hybrid_engine.plan import ExchangePlan
from megatron_rl.parallel.sharding import Box

WORD_BYTES = 8


class WeightMismatchError(RuntimeError):
    """A piece of a tensor differs from its owner's after an exchange; generation must not start."""


@dataclass(frozen=True)
class Check:
    """One piece on this rank, and where its owner's checksum stands: entry `index` of member `owner`'s list."""

    name: str
    segment: str
    box: Box
    view: Tensor
    owner: int
    index: int


class WeightVerifier:
    """Compares all pieces of this rank with their owners'. Every rank of `group` must make and call its own."""

    def __init__(
        self, plan: ExchangePlan, member: int, buffers: Mapping[int, Tensor], group: dist.ProcessGroup
    ) -> None:
        owned = owned_pieces(plan)
        self._rank = plan.members[member].rank
        self._ranks = [other.rank for other in plan.members]
        self._group = group
        self._longest = max(map(len, owned))
        self._device = next(iter(buffers.values())).device
        self._mine = [
            region_view(buffers, plan.held[member][name].region(segment, box)) for name, segment, box in owned[member]
        ]
        self._checks = []
        mine = plan.plans[member]
        for piece in [*mine.local, *mine.received]:
            index = owned[piece.owner][piece.name, piece.segment, piece.box]
            view = region_view(buffers, plan.dest_slot(piece).region(piece.segment, piece.box))
            segment = plan.tensors[piece.name].segments[piece.segment].name
            self._checks.append(Check(piece.name, segment, piece.box, view, piece.owner, index))

    @torch.no_grad()
    def verify(self) -> None:
        """Raise WeightMismatchError, on all ranks of the group alike, when a piece differs on any of them."""
        ours = torch.zeros(self._longest, dtype=torch.int64, device=self._device)
        if self._mine:
            ours[: len(self._mine)] = torch.stack([checksum(view) for view in self._mine])
        theirs = [torch.empty_like(ours) for _ in self._ranks]
        dist.all_gather(theirs, ours, group=self._group)
        wrong = self._wrong(theirs)
        counts = torch.zeros(len(self._ranks), dtype=torch.int64, device=self._device)
        counts[self._ranks.index(self._rank)] = len(wrong)
        dist.all_reduce(counts, group=self._group)
        if counts.any():
            raise WeightMismatchError(self._describe(wrong, counts.tolist()))

    def _wrong(self, theirs: list[Tensor]) -> list[Check]:
        if not self._checks:
            return []
        found = torch.stack([checksum(check.view) for check in self._checks])
        expected = torch.stack([theirs[check.owner][check.index] for check in self._checks])
        return [check for check, equal in zip(self._checks, (found == expected).tolist(), strict=True) if not equal]

    def _describe(self, wrong: Sequence[Check], counts: list[int]) -> str:
        if not wrong:
            ranks = [rank for rank, count in zip(self._ranks, counts, strict=True) if count]
            return f"rank {self._rank}: weights are right here, but wrong on rank(s) {ranks}"
        first = wrong[0]
        interval = " x ".join(f"[{start}, {stop})" for start, stop in first.box)
        return (
            f"rank {self._rank}: {first.name}, segment {first.segment}, elements {interval} differ from those of "
            f"rank {self._ranks[first.owner]}, their owner ({len(wrong)} of {len(self._checks)} pieces are wrong)"
        )


PieceKey = tuple[str, int, Box]


def owned_pieces(plan: ExchangePlan) -> list[dict[PieceKey, int]]:
    """For each member the different pieces it owns, numbered in an order that all ranks agree on."""
    owned: list[dict[PieceKey, int]] = [{} for _ in plan.members]
    for member_plan in plan.plans:
        for piece in (*member_plan.local, *member_plan.received):
            numbers = owned[piece.owner]
            numbers.setdefault((piece.name, piece.segment, piece.box), len(numbers))
    return owned


def checksum(view: Tensor) -> Tensor:
    """int64 scalar of a strided tensor's content; equal content in another memory layout gives the same."""
    rows = view.reshape(1, -1) if view.dim() < 2 else view
    if rows.shape[-1] * rows.element_size() % WORD_BYTES == 0:
        words = as_words(rows)
        sums = words.sum(-1).flatten()
    else:
        bits = rows.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()])
        sums = bits.sum(-1, dtype=torch.int64).flatten()
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()


def as_words(rows: Tensor) -> Tensor:
    """The same bytes as int64 along the last dim; a copy where they are not aligned to words."""
    per_word = WORD_BYTES // rows.element_size()
    aligned = rows.stride(-1) == 1 and all(
        number % per_word == 0 for number in (rows.storage_offset(), *rows.stride()[:-1])
    )
    return (rows if aligned else rows.contiguous()).view(torch.int64)
