"""Checksums of every moved piece of every tensor, at its owner and where it arrived.

The checksum of a piece with rows w_r of 64-bit words is  sum_r (2 r + 1) * sum(w_r)  mod 2^64. A changed bit always
changes it, because a product with an odd number loses no bit. Missing, exchanged or shifted rows change it too, except
for differences near 2^64 that cancel. A permutation within one row does not. The checksum does not depend on the path
of a piece, but owner and receiver use the same layout: the comparison of log-probs finds a layout that is wrong on both
sides, this one does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.hybrid_engine.exchange import region_view
from megatron_rl.hybrid_engine.plan import ExchangePlan
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.parallel.sharding import Box

WORD_BYTES = 8
MOST_ROWS = 1 << 20
"""Rows whose sums are on the device at once, of 8 bytes each, with four more numbers for each."""


def is_verified(number: int, every: int) -> bool:
    """Whether transfer `number`, counted from 0, is verified; every: see `HybridEngine`.

    The first one always is: a wrong plan or a wrong order of messages is wrong from the start.
    """
    return number == 0 or (every > 0 and number % every == 0)


class WeightMismatchError(RuntimeError):
    """A piece of a tensor differs from its owner's after an exchange; generation must not start."""


def places_of_true(flags: Tensor) -> list[int]:
    """Numbers of the elements that are true; the host waits for them."""
    found: list[int] = flags.nonzero().flatten().tolist()
    return found


@dataclass(frozen=True)
class Check:
    """One piece on this rank. Its owner's checksum is entry `index` of member `owner`'s list."""

    name: str
    segment: str
    box: Box
    owner: int
    index: int


class WeightVerifier:
    """Compares all pieces of one member with their owners'. Every member must make and call a verifier."""

    def __init__(self, plan: ExchangePlan, member: int, buffers: Mapping[int, Tensor], transport: Transport) -> None:
        owned = owned_pieces(plan)
        self._members = plan.members
        self._number = member
        self._transport = transport
        self._longest = max(map(len, owned))
        self._device = next(iter(buffers.values())).device
        held = [
            region_view(buffers, plan.held[member][name].region(segment, box)) for name, segment, box in owned[member]
        ]
        self._held = Checksums(held, self._device)
        self._num_held = len(held)
        self._checks = []
        views = []
        mine = plan.plans[member]
        for piece in [*mine.local, *mine.received]:
            index = owned[piece.owner][piece.name, piece.segment, piece.box]
            views.append(region_view(buffers, plan.dest_slot(piece).region(piece.segment, piece.box)))
            segment = plan.tensors[piece.name].segments[piece.segment].name
            self._checks.append(Check(piece.name, segment, piece.box, piece.owner, index))
        self._arrived = Checksums(views, self._device)
        self._owners = torch.tensor([check.owner for check in self._checks], dtype=torch.int64, device=self._device)
        self._indices = torch.tensor([check.index for check in self._checks], dtype=torch.int64, device=self._device)

    @torch.no_grad()
    def verify(self) -> None:
        """Raise WeightMismatchError on all members alike if a piece differs on any of them."""
        ours = torch.zeros(self._longest, dtype=torch.int64, device=self._device)
        ours[: self._num_held] = self._held.compute()
        theirs = self._transport.all_gather(ours)
        expected = torch.stack(theirs)[self._owners, self._indices]
        wrong = [self._checks[number] for number in places_of_true(self._arrived.compute() != expected)]
        counts = self._transport.all_gather(torch.tensor([len(wrong)]))
        if any(counts):
            raise WeightMismatchError(self._describe(wrong, [int(count) for count in counts]))

    def _describe(self, wrong: Sequence[Check], counts: list[int]) -> str:
        name = self._members[self._number].name
        if not wrong:
            there = [member.label for member, count in zip(self._members, counts, strict=True) if count]
            return f"{name}: weights are right here, but wrong on rank(s) [{', '.join(there)}]"
        first = wrong[0]
        interval = " x ".join(f"[{start}, {stop})" for start, stop in first.box)
        return (
            f"{name}: {first.name}, segment {first.segment}, elements {interval} differ from those of "
            f"{self._members[first.owner].name}, their owner ({len(wrong)} of {len(self._checks)} pieces are wrong)"
        )


PieceKey = tuple[str, int, Box]


def owned_pieces(plan: ExchangePlan) -> list[dict[PieceKey, int]]:
    """For each member the different pieces that it owns, numbered in an order that all ranks agree on."""
    owned: list[dict[PieceKey, int]] = [{} for _ in plan.members]
    for member_plan in plan.plans:
        for piece in (*member_plan.local, *member_plan.received):
            numbers = owned[piece.owner]
            numbers.setdefault((piece.name, piece.segment, piece.box), len(numbers))
    return owned


class Checksums:
    """Checksums of many strided tensors: one kernel for each, and a few for every `MOST_ROWS` rows.

    Equal content in another memory layout gives the same checksum. The tensors' memory may be released in between.
    Between calls a checksum keeps one number on the device, not one for every row: rows of experts are many and short.
    """

    def __init__(self, views: Sequence[Tensor], device: torch.device) -> None:
        shaped = [view.reshape(1, -1) if view.dim() < 2 else view for view in views]
        counts = [view[..., 0].numel() for view in shaped]
        words = [as_words(view) for view in shaped]
        self._device = device
        self._runs = [
            _Run(words[first:stop], torch.tensor(counts[first:stop], dtype=torch.int64, device=device), num_rows)
            for first, stop, num_rows in runs_of_rows(counts)
        ]
        self._most_rows = max((run.num_rows for run in self._runs), default=0)

    def compute(self) -> Tensor:
        """int64 [number of tensors]."""
        scratch = torch.empty(self._most_rows, dtype=torch.int64, device=self._device)
        of_runs = [run.compute(scratch[: run.num_rows]) for run in self._runs]
        return torch.cat([torch.zeros(0, dtype=torch.int64, device=self._device), *of_runs])


@dataclass(frozen=True)
class _Run:
    """Neighbouring tensors: their words, see `as_words`, and their rows: int64 [tensors], which add up to num_rows."""

    words: list[tuple[Tensor, bool]]
    counts: Tensor
    num_rows: int

    def compute(self, row_sums: Tensor) -> Tensor:
        """Return int64 [tensors]; row_sums: int64 [num_rows], overwritten."""
        start = 0
        for words, must_copy in self.words:
            source = words.contiguous().view(torch.int64) if must_copy else words
            stop = start + source[..., 0].numel()
            torch.sum(source, -1, dtype=torch.int64, out=row_sums[start:stop].view(source.shape[:-1]))
            start = stop
        numbers = torch.arange(len(self.words), device=row_sums.device)
        owner = numbers.repeat_interleave(self.counts, output_size=self.num_rows)
        row_of_owner = (
            torch.arange(self.num_rows, device=row_sums.device) - (self.counts.cumsum(0) - self.counts)[owner]
        )
        result = torch.zeros(len(self.words), dtype=torch.int64, device=row_sums.device)
        return result.index_add_(0, owner, row_sums.mul_(row_of_owner.mul_(2).add_(1)))


def runs_of_rows(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Cut tensors with that many rows into runs: (first, stop, rows), of at most MOST_ROWS rows or a single tensor."""
    runs: list[tuple[int, int, int]] = []
    for number, count in enumerate(counts):
        if runs and runs[-1][2] + count <= MOST_ROWS:
            first, _, num_rows = runs.pop()
            runs.append((first, number + 1, num_rows + count))
        else:
            runs.append((number, number + 1, count))
    return runs


def as_words(rows: Tensor) -> tuple[Tensor, bool]:
    """The integers that a row's sum adds, and whether they are 64-bit words only after a copy.

    They are words if a row is a whole number of words, else as wide as the elements. The choice depends on the shape
    alone, so that both sides of a comparison make the same choice.
    """
    size = rows.element_size()
    if rows.shape[-1] * size % WORD_BYTES:
        return rows.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]), False
    per_word = WORD_BYTES // size
    aligned = rows.stride(-1) == 1 and all(
        number % per_word == 0 for number in (rows.storage_offset(), *rows.stride()[:-1])
    )
    return (rows.view(torch.int64), False) if aligned else (rows, True)
