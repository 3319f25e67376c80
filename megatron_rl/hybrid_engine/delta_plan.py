"""The pieces of a weight transfer's plan whose changes travel, and their messages. Pure.

A unit is a piece, or a part of a long one. It is the same on every hop, so a rank can pass it on as it came. All ranks
know how many elements of each unit changed, and make the same messages of that. Pairs of ranks take turns in the rounds
of `schedule.py`; a unit without changes is in no message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl.hybrid_engine.delta_sizes import MOST_NUMEL
from megatron_rl.hybrid_engine.layout import Region, Slot, split_box
from megatron_rl.hybrid_engine.plan import ExchangePlan, Piece
from megatron_rl.hybrid_engine.schedule import by_round
from megatron_rl.parallel.sharding import Box, box_numel

UnitKey = tuple[int, int]
"""(the member in whose training copy a unit was, its number among those of this member)."""


class Unit(NamedTuple):
    """One unit at one end of a hop. region: where it lies there."""

    key: UnitKey
    region: Region

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.region.numel


@dataclass(frozen=True)
class DeltaTurn:
    """What one member sends to one other and receives from one other in one round of a phase, in order."""

    phase: int
    dest: int | None
    source: int | None
    sent: tuple[Unit, ...]
    received: tuple[Unit, ...]


@dataclass(frozen=True)
class DeltaPlan:
    """The turns of one member, in order. numels: elements of every unit, [owner][number]."""

    turns: tuple[DeltaTurn, ...]
    numels: tuple[tuple[int, ...], ...]

    @property
    def owned(self) -> list[Unit]:
        """The units that leave training from this member, in order of their numbers."""
        return sorted(unit for turn in self.turns if turn.phase == 0 for unit in turn.sent)

    @property
    def passed_on(self) -> set[UnitKey]:
        """The units that this member receives and passes on."""
        return {unit.key for turn in self.turns if turn.phase > 0 for unit in turn.sent}


def make_delta_plan(plan: ExchangePlan, member: int, unit_numel: int) -> DeltaPlan:
    """The turns of a member of a weight transfer's plan. unit_numel: the most elements of a unit, the same on all
    members."""
    limit = min(unit_numel, MOST_NUMEL)
    keys: dict[tuple[str, int, Box], UnitKey] = {}
    numels: list[list[int]] = [[] for _ in plan.members]
    for mine in plan.plans:
        for piece in mine.received:
            for box in split_box(piece.box, limit) if piece.phase == 0 else ():
                keys[piece.name, piece.segment, box] = piece.owner, len(numels[piece.owner])
                numels[piece.owner].append(box_numel(box))

    def units(pieces: Iterable[Piece], slot_of: Callable[[Piece], Slot]) -> tuple[Unit, ...]:
        return tuple(
            Unit(keys[piece.name, piece.segment, box], slot_of(piece).region(piece.segment, box).collapsed())
            for piece in pieces
            for box in split_box(piece.box, limit)
        )

    sent, received = by_round(plan, plan.sent[member]), by_round(plan, plan.plans[member].received)
    turns = [
        DeltaTurn(
            phase=key[0],
            dest=sent[key][0].dest if key in sent else None,
            source=received[key][0].source if key in received else None,
            sent=units(sent.get(key, ()), plan.source_slot),
            received=units(received.get(key, ()), plan.dest_slot),
        )
        for key in sorted(sent.keys() | received.keys())
    ]
    return DeltaPlan(tuple(turns), tuple(map(tuple, numels)))


def grouped(units: Sequence[Unit], size_of: Callable[[Unit], int], most_bytes: int) -> Iterator[list[Unit]]:
    """Units of one pair as messages of at most `most_bytes`, in order; those of size 0 are left out.

    Both ends call it with the same sizes. No unit may be larger than a message.
    """
    message: list[Unit] = []
    in_message = 0
    for unit in units:
        size = size_of(unit)
        if message and in_message + size > most_bytes:
            yield message
            message, in_message = [], 0
        if size:
            message.append(unit)
            in_message += size
    if message:
        yield message
