"""Turn pieces into messages: one rank's part of an exchange as a list of steps with at most one send and receive each.

Steps are ordered alike on all ranks: by phase, then by round (`ExchangePlan.rounds`), then by message. In one round
every rank has one receiver and one sender at most, so a step never waits for more than its two peers, and a rank that
finishes its steps in order can never block the others. What a rank passes on (phase 1 and later) must have arrived
before: `Step.after` says which of its own steps it finishes first. These are earlier ones, so ranks still never block
each other.

What lies without gaps at both ends travels as it lies, if it is long enough; everything else is packed into buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import NamedTuple, Protocol, Self, TypeVar

from megatron_rl.hybrid_engine.layout import Region, Slot, merged, split_box
from megatron_rl.hybrid_engine.plan import ExchangePlan, Piece
from megatron_rl.parallel.sharding import Box

DIRECT_NUMEL = 1 << 18
"""Elements from which a run without gaps is a message of its own: shorter ones cost more as messages than as copies."""


@dataclass(frozen=True)
class Leg:
    """One side of a message: the peer's number, and the regions it is gathered from or scattered to, in order."""

    peer: int
    regions: tuple[Region, ...]

    @property
    def numel(self) -> int:
        return sum(region.numel for region in self.regions)

    @property
    def is_direct(self) -> bool:
        """Whether the message is contiguous in the buffer, so that it needs no scratch memory."""
        return len(self.regions) == 1 and self.regions[0].is_contiguous


@dataclass(frozen=True)
class Step:
    """One send, one receive, or both at the same time, on one rank.

    after: this many of the rank's first steps bring something that `send` passes on, or come before one that does;
    they must be finished before the message is read.
    """

    send: Leg | None
    receive: Leg | None
    after: int = 0


def make_schedule(plan: ExchangePlan, member: int, message_numel: int) -> list[Step]:
    """All steps of one member; no message is longer than `message_numel` elements."""
    sends, receives = by_round(plan, plan.sent[member]), by_round(plan, plan.plans[member].received)
    steps: list[Step] = []
    arrives: dict[Region, int] = {}  # where a fragment is written -> the step that brings it
    for key in sorted(sends.keys() | receives.keys()):
        phase, _ = key
        out = messages(fragments(sends[key], plan, message_numel), message_numel)
        into = messages(fragments(receives[key], plan, message_numel), message_numel)
        for sent, received in zip_longest(out, into):
            after = 1 + max(arrives[fragment.source] for fragment in sent) if sent and phase > 0 else 0
            arrives |= {fragment.dest: len(steps) for fragment in received or ()}
            send = Leg(sends[key][0].dest, merged(fragment.source for fragment in sent)) if sent else None
            receive = Leg(receives[key][0].source, merged(fragment.dest for fragment in received)) if received else None
            steps.append(Step(send, receive, after))
    return steps


def local_copies(plan: ExchangePlan, member: int) -> list[tuple[Region, Region]]:
    """(source, destination) of the copies from a member's own training shards into its receive buffer."""
    return [
        (
            plan.source_slot(piece).region(piece.segment, piece.box),
            plan.dest_slot(piece).region(piece.segment, piece.box),
        )
        for piece in plan.plans[member].local
    ]


def by_round(plan: ExchangePlan, pieces: Iterable[Piece]) -> dict[tuple[int, int], list[Piece]]:
    """(phase, round) -> pieces, all between the same two members."""
    by_round: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_round[piece.phase, plan.rounds[piece.phase, piece.source, piece.dest]].append(piece)
    return by_round


class Fragment(NamedTuple):
    """Elements that travel together, at both ends; `is_flat`: without gaps at both."""

    source: Region
    dest: Region

    @property
    def numel(self) -> int:
        return self.source.numel

    @property
    def is_flat(self) -> bool:
        return self.source.is_contiguous and self.dest.is_contiguous

    def continues(self, other: Self) -> bool:
        """Whether it starts where `other` ends, both without gaps, at both ends."""
        return self.source.continues(other.source) and self.dest.continues(other.dest)


class CountedFragment(NamedTuple):
    """A fragment as numbers. flat: whether it has no gaps at its sender, at its receiver. starts: (buffer, offset) of
    both ends.
    """

    numel: int
    flat: tuple[bool, bool]
    starts: tuple[tuple[int, int], tuple[int, int]]

    @property
    def is_flat(self) -> bool:
        return all(self.flat)

    def follows(self, other: CountedFragment, side: int) -> bool:
        """Whether it starts where `other` ends, both without gaps, at the sender (side 0) or the receiver (1)."""
        (buffer, offset), (before, start) = self.starts[side], other.starts[side]
        return offset == start + other.numel and buffer == before and self.flat[side] and other.flat[side]

    def continues(self, other: CountedFragment) -> bool:
        """See `Fragment.continues`."""
        return self.follows(other, 0) and self.follows(other, 1)


Piecewise = TypeVar("Piecewise", Fragment, CountedFragment)


class Ends(Protocol):
    """The slots of a piece at both ends, by a whole plan or by one that only counts."""

    def source_slot(self, piece: Piece) -> Slot:
        """The slot from which the sender reads a piece."""

    def dest_slot(self, piece: Piece) -> Slot:
        """The slot to which the receiver writes a piece."""


def fragments(pieces: Iterable[Piece], plan: Ends, message_numel: int) -> Iterator[Fragment]:
    """Pieces cut into fragments of at most `message_numel` elements, in order."""
    for piece in pieces:
        source, dest = plan.source_slot(piece), plan.dest_slot(piece)
        for box in split_box(piece.box, message_numel):
            yield Fragment(source.region(piece.segment, box).collapsed(), dest.region(piece.segment, box).collapsed())


def messages(stream: Iterable[Piecewise], message_numel: int) -> Iterator[list[Piecewise]]:
    """Fragments of one pair as messages: long flat runs alone, the rest in buckets that are filled in order."""
    bucket: list[Piecewise] = []
    in_bucket = 0
    for run in flat_runs(stream):
        is_direct = run[0].is_flat and total(run) >= DIRECT_NUMEL
        message, numel = ([], 0) if is_direct else (bucket, in_bucket)
        for fragment in run:
            if message and numel + fragment.numel > message_numel:
                yield list(message)
                message.clear()
                numel = 0
            message.append(fragment)
            numel += fragment.numel
        if is_direct:
            yield message
        else:
            in_bucket = numel
    if bucket:
        yield bucket


def flat_runs(stream: Iterable[Piecewise]) -> Iterator[list[Piecewise]]:
    """Join fragments that continue each other at both ends."""
    run: list[Piecewise] = []
    for fragment in stream:
        if run and not fragment.continues(run[-1]):
            yield run
            run = []
        run.append(fragment)
    if run:
        yield run


def total(stream: Iterable[Fragment] | Iterable[CountedFragment]) -> int:
    """Elements of all fragments."""
    return sum(fragment.numel for fragment in stream)


def most_packed(plan: ExchangePlan, member: int, message_numel: int) -> int:
    """Elements of the longest message of `make_schedule` that needs scratch memory at this member; 0: none does."""
    sides = [(0, pieces) for pieces in by_round(plan, plan.sent[member]).values()]
    sides += [(1, pieces) for pieces in by_round(plan, plan.plans[member].received).values()]
    return longest_packed(plan, sides, message_numel)


def longest_packed(plan: Ends, sides: Iterable[tuple[int, Sequence[Piece]]], message_numel: int) -> int:
    """Elements of the longest message that needs scratch memory. sides: the pieces of each pair of members and phase,
    with the end that is asked about, the sender (0) or the receiver (1).
    """
    counts = _FragmentCounts(plan, message_numel)
    most = 0
    for side, pieces in sides:
        for message in messages(counts.of(pieces), message_numel):
            numel = total(message)
            if numel > most and not _is_one_run(message, side):
                most = numel
    return most


def _is_one_run(message: Sequence[CountedFragment], side: int) -> bool:
    return message[0].flat[side] and all(after.follows(before, side) for before, after in pairwise(message))


class _FragmentCounts:
    """`fragments` as numbers. Those of pieces with equal shards differ only in where their slots begin, so that such
    pieces are cut once.
    """

    def __init__(self, plan: Ends, message_numel: int) -> None:
        self._plan, self._message_numel = plan, message_numel
        self._known: dict[tuple[int, int, int, Box], list[tuple[int, tuple[bool, bool], int, int]]] = {}

    def of(self, pieces: Iterable[Piece]) -> Iterator[CountedFragment]:
        """The fragments of the pieces of one pair, in order."""
        for piece in pieces:
            source, dest = self._plan.source_slot(piece), self._plan.dest_slot(piece)
            key = id(source.shard), id(dest.shard), piece.segment, piece.box  # the plan keeps the shards
            if key not in self._known:
                self._known[key] = [
                    (
                        cut.numel,
                        (cut.source.is_contiguous, cut.dest.is_contiguous),
                        cut.source.offset - source.offset,
                        cut.dest.offset - dest.offset,
                    )
                    for cut in fragments([piece], self._plan, self._message_numel)
                ]
            for numel, flat, sent_from, sent_to in self._known[key]:
                starts = (source.buffer, source.offset + sent_from), (dest.buffer, dest.offset + sent_to)
                yield CountedFragment(numel, flat, starts)
