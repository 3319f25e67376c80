"""Plan the transfer of weights from a training pool to a rollout pool on other ranks: pure data, equal on all ranks.

The receivers may also be a pool whose roles follow the policy: then each has a place in a training layout, and wants
the tensors of its pipeline stage alone.

Every element leaves the training pool once, however many replicas generate. Phase 0: one receiver fetches a piece from
one of its holders. Phase 1: it passes the piece on to one rank on each other node that needs it. Phase 2: inside nodes,
to all the others. So replicas share the work: each fetches its part of their common shard, and they exchange the parts
(scatter, then all-gather). Data-parallel holders share the sending in the same way.

Balance: pieces with the same holders and the same receivers form a class. A class is split into chunks in the order of
the buffers, so that adjacent elements travel together. Each chunk is sent by the holder that has sent least so far, to
the receiver that has fetched least. Two ranks that hold (or want) the same elements therefore differ by one chunk at
most.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_rl.hybrid_engine.layout import split_box
from megatron_rl.hybrid_engine.plan import (
    ExchangePlan,
    Holders,
    Hop,
    Member,
    MemberPlan,
    Piece,
    cuts,
    place_slot,
    tensor_holders,
)
from megatron_rl.parallel.sharding import Box, LogicalTensor, Place, box_numel

MIN_CHUNK = 1 << 18
"""Least number of elements of a chunk; smaller chunks would balance better, but each may cost a message."""
PARTS_PER_CHUNK = 8
"""Boxes longer than this fraction of a chunk are cut, so that chunks have nearly equal sizes."""

TRAINING, ROLLOUT = "training", "rollout"


@dataclass(frozen=True)
class Lot:
    """One box of one segment, which leaves training once. Its class has its holders and receivers."""

    name: str
    segment: int
    box: Box


Class = tuple[tuple[int, ...], tuple[int, ...]]
"""(holders, receivers), by member number."""
Wanted = tuple[Place, tuple[str, ...] | None]
"""(place, names of tensors; None: all)."""


def make_transfer_plan(
    tensors: Mapping[str, LogicalTensor], senders: Sequence[Member], receivers: Sequence[Member]
) -> ExchangePlan:
    """Plan the transfer after which every receiver has its shard of every tensor that it wants.

    senders: all ranks of the training pool, which want nothing; receivers: all ranks of the other pool, which hold
    nothing and have one layout. Nodes are numbered alike in both pools. The plan's members are the senders, then the
    receivers. Raises ValueError if the senders do not hold every element of a tensor, if a member holds and wants, or
    if receivers have different layouts.
    """
    _check_ends(senders, receivers)
    members = [replace(sender, pool=TRAINING) for sender in senders]
    members += [replace(receiver, pool=ROLLOUT) for receiver in receivers]
    held = [{slot.name: slot for slot in member.held} for member in members]
    holders = tensor_holders(tensors, held)
    if missing := tensors.keys() - holders.keys():
        raise ValueError(f"no training rank holds {', '.join(sorted(missing))}")
    plans = _receiving_plans(tensors, members)
    _Dealer(members, plans).deal(_classes(tensors, members, plans, holders))
    return ExchangePlan(tensors, members, held, plans)


def receiving_slots(tensors: Mapping[str, LogicalTensor], place: Place) -> MemberPlan:
    """The slots of a receiver's shard of every tensor in its buffer; the plan has no pieces to receive yet."""
    plan = MemberPlan()
    for name, tensor in tensors.items():
        plan.slots[name] = place_slot(plan, tensor, place)
    return plan


def model_numel(tensors: Mapping[str, LogicalTensor]) -> int:
    """Number of elements of all tensors without padding: exactly those that leave the training pool."""
    return sum(tensor.numel for tensor in tensors.values())


def _check_ends(senders: Sequence[Member], receivers: Sequence[Member]) -> None:
    for sender in senders:
        if sender.wanted is not None:
            raise ValueError(
                f"training rank {sender.rank} of a weight transfer asks for a rollout shard: leave `wanted` out"
            )
    for receiver in receivers:
        if receiver.wanted is None or receiver.held:
            raise ValueError(f"rollout rank {receiver.rank} of a weight transfer must ask for a shard and have none")
    places = [member.wanted for member in receivers if member.wanted is not None]
    layouts = {(at.tp_size, at.vocab_multiple, at.ep_size, at.etp_size) for at in places}
    if len(layouts) != 1:
        raise ValueError(
            "rollout ranks of one weight transfer share one layout; (tp, vocabulary multiple, ep, etp): "
            f"{sorted(layouts)}"
        )


def _receiving_plans(tensors: Mapping[str, LogicalTensor], members: Sequence[Member]) -> list[MemberPlan]:
    """One plan for each member, with slots for members that want a shard; replicas share the slot objects."""
    laid_out: dict[Wanted, MemberPlan] = {}
    plans = []
    for member in members:
        wanted, mine = wanted_by(member), MemberPlan()
        if wanted is not None:
            if wanted not in laid_out:
                laid_out[wanted] = receiving_slots(named(tensors, member.names), wanted[0])
            mine = MemberPlan(laid_out[wanted].slots, laid_out[wanted].foreign_numel)
        plans.append(mine)
    return plans


def named(tensors: Mapping[str, LogicalTensor], names: Sequence[str] | None) -> dict[str, LogicalTensor]:
    """The tensors of these names, in the order of `tensors`; None: all."""
    kept = tensors.keys() if names is None else set(names)
    return {name: tensor for name, tensor in tensors.items() if name in kept}


def wanted_by(member: Member) -> Wanted | None:
    """Return the place and the names that a member wants, equal for its replicas; None: it wants nothing."""
    return None if member.wanted is None else (member.wanted, member.names)


def _classes(
    tensors: Mapping[str, LogicalTensor],
    members: Sequence[Member],
    plans: Sequence[MemberPlan],
    holders: Mapping[str, list[Holders]],
) -> dict[Class, list[Lot]]:
    """All boxes that must move, by holders and receivers, in the order of the tensors."""
    replicas: dict[Wanted, list[int]] = defaultdict(list)
    for number, member in enumerate(members):
        if (wanted := wanted_by(member)) is not None:
            replicas[wanted].append(number)
    lots: dict[Class, list[Lot]] = defaultdict(list)
    for name, segments in holders.items():
        slots = [(plans[numbers[0]].slots.get(name), numbers) for numbers in replicas.values()]
        takers = [(slot, numbers) for slot, numbers in slots if slot is not None]
        moved = 0
        for (segment, box, having), numbers in cuts(takers, segments).items():
            lots[having, tuple(sorted(numbers))].append(Lot(name, segment, box))
            moved += box_numel(box)
        if moved != tensors[name].numel:
            raise ValueError(f"the receiving ranks want {moved} of the {tensors[name].numel} elements of {name}")
    return lots


class _Dealer:
    """Assigns lots to holders and receivers, and fills the receivers' plans."""

    def __init__(self, members: Sequence[Member], plans: Sequence[MemberPlan]) -> None:
        self._members = members
        self._plans = plans
        self._sent = [0] * len(members)
        self._fetched = [0] * len(members)
        self._entered = [0] * len(members)

    def deal(self, classes: Mapping[Class, list[Lot]]) -> None:
        """Assign all lots; classes with the fewest holders and receivers come first."""
        for (having, wanting), lots in sorted(classes.items(), key=lambda item: tuple(map(len, item[0]))):
            for chunk in chunks(lots, math.lcm(len(having), len(wanting))):
                numel = sum(box_numel(lot.box) for lot in chunk)
                owner = min(having, key=lambda number: (self._sent[number], number))
                first = min(wanting, key=lambda number: (self._fetched[number], number))
                self._sent[owner] += numel
                self._fetched[first] += numel
                for hop in self._hops(owner, first, wanting, numel):
                    received = self._plans[hop.dest].received
                    received.extend(Piece(lot.name, lot.segment, lot.box, *hop) for lot in chunk)

    def _hops(self, owner: int, first: int, wanting: Sequence[int], numel: int) -> Iterator[Hop]:
        """The hops of one chunk to all its receivers. Chunks from other nodes are spread over the ranks of a node."""
        nodes: dict[int, list[int]] = defaultdict(list)
        for number in wanting:
            nodes[self._members[number].node].append(number)
        self._entered[first] += numel
        yield Hop(owner, first, 0, owner)
        for node, numbers in nodes.items():
            entry = first
            if node != self._members[first].node:
                entry = min(numbers, key=lambda number: (self._entered[number], number))
                self._entered[entry] += numel
                yield Hop(first, entry, 1, owner)
            yield from (Hop(entry, number, 2, owner) for number in numbers if number != entry)


def chunks(lots: Sequence[Lot], number: int) -> Iterator[list[Lot]]:
    """Cut a class into about `number` chunks of equal size, or fewer of MIN_CHUNK elements; in order.

    A chunk exceeds the target size by at most one box (1/PARTS_PER_CHUNK of it, or a single row).
    """
    total = sum(box_numel(lot.box) for lot in lots)
    size = max(-(-total // number), MIN_CHUNK)
    chunk: list[Lot] = []
    numel = done = 0
    for lot in lots:
        for box in split_box(lot.box, -(-size // PARTS_PER_CHUNK)):
            chunk.append(replace(lot, box=box))
            numel += box_numel(box)
            # Ends are counted from the start, so that the next chunk is smaller by what this one has too much.
            if done + numel >= size * (done // size + 1):
                yield chunk
                done += numel
                chunk, numel = [], 0
    if chunk:
        yield chunk
