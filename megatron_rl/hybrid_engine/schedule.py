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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from megatron_rl.hybrid_engine.layout import Region, merged, split_box
from megatron_rl.hybrid_engine.plan import ExchangePlan, Piece

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


def fragments(pieces: Iterable[Piece], plan: ExchangePlan, message_numel: int) -> Iterator[Fragment]:
    """Pieces cut into fragments of at most `message_numel` elements, in order."""
    for piece in pieces:
        source, dest = plan.source_slot(piece), plan.dest_slot(piece)
        for box in split_box(piece.box, message_numel):
            yield Fragment(source.region(piece.segment, box).collapsed(), dest.region(piece.segment, box).collapsed())


def messages(stream: Iterable[Fragment], message_numel: int) -> Iterator[list[Fragment]]:
    """Fragments of one pair as messages: long flat runs alone, the rest in buckets that are filled in order."""
    bucket: list[Fragment] = []
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


def flat_runs(stream: Iterable[Fragment]) -> Iterator[list[Fragment]]:
    """Join fragments that continue each other at both ends."""
    run: list[Fragment] = []
    for fragment in stream:
        if run and not (fragment.source.continues(run[-1].source) and fragment.dest.continues(run[-1].dest)):
            yield run
            run = []
        run.append(fragment)
    if run:
        yield run


def total(stream: Iterable[Fragment]) -> int:
    """Elements of all fragments."""
    return sum(fragment.numel for fragment in stream)
