"""From pieces to messages: one rank's part of an exchange as a list of steps, each with at most one send and receive.

Steps are ordered alike on all ranks: by phase, then by the distance from sender to receiver in the group, then by
bucket. At one distance every rank has one receiver and one sender, so a step never waits for more than its two peers,
and a rank that finishes its steps in order can never block the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_rl.hybrid_engine.layout import Region, Slot, merged, split_box
from megatron_rl.hybrid_engine.plan import ExchangePlan, Piece
from megatron_rl.parallel.sharding import Box, box_numel


@dataclass(frozen=True)
class Leg:
    """One side of a message: the peer's global rank, and the regions it is gathered from or scattered to, in order."""

    peer: int
    regions: tuple[Region, ...]

    @property
    def numel(self) -> int:
        return sum(region.numel for region in self.regions)

    @property
    def is_direct(self) -> bool:
        """Whether the message lies in the buffer as it travels, so that no scratch memory is needed."""
        return len(self.regions) == 1 and self.regions[0].is_contiguous


@dataclass(frozen=True)
class Step:
    """What one rank does at the same time: send, receive, or both."""

    send: Leg | None
    receive: Leg | None


def make_schedule(plan: ExchangePlan, member: int, message_numel: int) -> list[Step]:
    """All steps of one member; no message is longer than `message_numel` elements."""
    size = len(plan.members)
    sends = _by_phase_and_distance(plan.sent(member), size)
    receives = _by_phase_and_distance(plan.plans[member].received, size)
    steps = []
    for key in sorted(sends.keys() | receives.keys()):
        out = list(_legs(sends[key], plan, message_numel, is_send=True))
        into = list(_legs(receives[key], plan, message_numel, is_send=False))
        for number in range(max(len(out), len(into))):
            steps.append(Step(out[number] if number < len(out) else None, into[number] if number < len(into) else None))
    return steps


def local_copies(plan: ExchangePlan, member: int) -> list[tuple[Region, Region]]:
    """(source, destination) of what a member copies from its own training shards into its foreign buffer."""
    return [
        (
            plan.source_slot(piece).region(piece.segment, piece.box),
            plan.dest_slot(piece).region(piece.segment, piece.box),
        )
        for piece in plan.plans[member].local
    ]


def _by_phase_and_distance(pieces: Iterable[Piece], size: int) -> dict[tuple[int, int], list[Piece]]:
    found: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.phase, (piece.dest - piece.source) % size].append(piece)
    return found


def _legs(pieces: list[Piece], plan: ExchangePlan, message_numel: int, is_send: bool) -> Iterator[Leg]:
    """The messages between one pair, seen from one side; both sides cut at the same elements."""
    for bucket in fill_buckets(pieces, message_numel):
        regions = (_slot(plan, piece, is_send).region(piece.segment, box) for piece, box in bucket)
        first = bucket[0][0]
        peer = plan.members[first.dest if is_send else first.source].rank
        yield Leg(peer, merged(regions))


def _slot(plan: ExchangePlan, piece: Piece, is_send: bool) -> Slot:
    return plan.source_slot(piece) if is_send else plan.dest_slot(piece)


def fill_buckets(pieces: Iterable[Piece], message_numel: int) -> Iterator[list[tuple[Piece, Box]]]:
    """Cut pieces into boxes and fill buckets with them in order; an element stays in the order of its piece."""
    bucket: list[tuple[Piece, Box]] = []
    free = message_numel
    for piece in pieces:
        for box in split_box(piece.box, message_numel):
            if box_numel(box) > free:
                yield bucket
                bucket, free = [], message_numel
            bucket.append((piece, box))
            free -= box_numel(box)
    if bucket:
        yield bucket
