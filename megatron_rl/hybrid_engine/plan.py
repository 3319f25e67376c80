"""Plan an exchange: what every rank of the group needs for generation, does not have, and receives from whom. Pure
data.

Training cuts every segment of a logical tensor into boxes, each held by one rank or by several. A rank needs its
rollout shard. Each intersection of it with a box that the rank does not hold is one piece, sent by one holder. So every
element arrives exactly once, and a rank receives what it needs minus what it holds.

With ranks on several nodes, a piece is sent to a node once: one rank there fetches it (phase 0) and passes it on to the
others that need it (phase 1). If the rollout TP size divides training's and stages are on different nodes, that is an
exchange among pipeline stages followed by one inside micro-DP groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import NamedTuple

from megatron_rl.hybrid_engine.layout import FOREIGN, Slot
from megatron_rl.parallel.sharding import Box, LogicalTensor, Place, box_numel, intersect, shard_of

ALIGNMENT = 64
"""Elements; received slots start at a multiple of it, as parameters do in Megatron's buffers."""
ON_HOST = "base on the host"
"""The memory plan's name of copies of frozen received weights, where the host is the device."""
HOST_UNIT = 1 << 20
"""Bytes to which copies in host memory are rounded up (`offload.piece_sizes`)."""
IN_SLOTS, STAGED = "adapter slots", "staged adapter"
"""The memory plan's names of resident adapters in generation, and of one on its way there."""


@dataclass(frozen=True)
class Member:
    """One rank of an exchange group. held: its training shards, by buffer and offset; wanted: its rollout place.

    A rank that only trains wants nothing (None); a rank that only generates holds nothing. rank: in its own world.
    pool: the name of that world, if the members are of several worlds. names: the tensors of which it wants shards, as
    of a pipeline stage; None: all.
    """

    rank: int
    node: int
    tp_rank: int
    held: tuple[Slot, ...] = ()
    wanted: Place | None = None
    pool: str = ""
    names: tuple[str, ...] | None = None

    @property
    def rollout_place(self) -> Place:
        """`wanted` of a rank that generates. Raises ValueError for a rank that does not."""
        if self.wanted is None:
            raise ValueError(f"{self.name} does not generate")
        return self.wanted

    @property
    def label(self) -> str:
        """Short, for lists of ranks."""
        return f"{self.pool} {self.rank}".lstrip()

    @property
    def name(self) -> str:
        """For messages about this rank."""
        return f"{self.pool} rank {self.rank}".lstrip()


class Piece(NamedTuple):
    """One box of one segment that member `source` gives to member `dest`.

    In phase 0 the source holds it in training; in later ones it passes on what it received in an earlier one. `owner`
    is the member whose training copy it once was.
    """

    name: str
    segment: int
    box: Box
    source: int
    dest: int
    phase: int
    owner: int

    @property
    def numel(self) -> int:
        return box_numel(self.box)


@dataclass
class MemberPlan:
    """The shards of one member during generation.

    slots: its rollout shards by name, in training's buffers where the shard is the same (shared memory), else in the
    receive buffer of `foreign_numel` elements. local: pieces it copies from its own training shards. received: those
    that others send it.
    """

    slots: dict[str, Slot] = field(default_factory=dict)
    foreign_numel: int = 0
    local: list[Piece] = field(default_factory=list)
    received: list[Piece] = field(default_factory=list)

    @property
    def shared(self) -> set[str]:
        """Names of the tensors that generation reads in training's memory."""
        return {name for name, slot in self.slots.items() if slot.buffer != FOREIGN}

    @property
    def foreign(self) -> list[Slot]:
        """The slots of the receive buffer."""
        return [slot for slot in self.slots.values() if slot.buffer == FOREIGN]

    @property
    def numel_needed(self) -> int:
        return sum(box_numel(part.box) for slot in self.foreign for part in slot.shard.parts)

    @property
    def numel_lacking(self) -> int:
        """The lower bound of what must be received: elements needed minus those held."""
        return self.numel_needed - sum(piece.numel for piece in self.local)


@dataclass(frozen=True)
class ExchangePlan:
    """Everything that one resharding moves inside an exchange group; the same on all of its ranks.

    Members are known by their numbers: their places in `members`.
    """

    tensors: Mapping[str, LogicalTensor]
    members: Sequence[Member]
    held: Sequence[Mapping[str, Slot]]
    plans: Sequence[MemberPlan]

    def source_slot(self, piece: Piece) -> Slot:
        """The slot from which the sender reads a piece."""
        return self.held[piece.source][piece.name] if piece.phase == 0 else self.plans[piece.source].slots[piece.name]

    def dest_slot(self, piece: Piece) -> Slot:
        """The slot to which the receiver writes a piece."""
        return self.plans[piece.dest].slots[piece.name]

    def numel_over_network(self, member: int) -> int:
        """Elements that a member receives from other nodes: pieces that its node does not have and that it fetches."""
        node = self.members[member].node
        received = self.plans[member].received
        return sum(piece.numel for piece in received if self.members[piece.source].node != node)

    @cached_property
    def rounds(self) -> dict[tuple[int, int, int], int]:
        """(phase, source, dest) -> round of the phase in which the two exchange messages.

        In a round every member sends to at most one other and receives from at most one. Pairs take the first round
        that is free, those at a small distance in the group first: where all exchange with all, that is the distance.
        """
        size = len(self.members)
        pairs = {(piece.phase, piece.source, piece.dest) for plan in self.plans for piece in plan.received}
        sending: dict[tuple[int, int], set[int]] = defaultdict(set)
        receiving: dict[tuple[int, int], set[int]] = defaultdict(set)
        found = {}
        for phase, source, dest in sorted(pairs, key=lambda pair: ((pair[2] - pair[1]) % size, pair)):
            busy = sending[phase, source], receiving[phase, dest]
            number = next(number for number in count() if number not in busy[0] and number not in busy[1])
            for numbers in busy:
                numbers.add(number)
            found[phase, source, dest] = number
        return found

    @cached_property
    def sent(self) -> list[list[Piece]]:
        """Every piece that each member sends, in the order of its receivers' plans."""
        found: list[list[Piece]] = [[] for _ in self.members]
        for plan in self.plans:
            for piece in plan.received:
                found[piece.source].append(piece)
        return found


Holders = dict[Box, tuple[int, ...]]
"""The different boxes that training cuts one segment into, with the members that hold each."""


def make_plan(
    tensors: Mapping[str, LogicalTensor], members: Sequence[Member], *, share_memory: Sequence[bool]
) -> ExchangePlan:
    """Plan the exchange after which every member has its rollout shard of every tensor.

    share_memory[i]: whether member i may read shards that are the same in training and rollout where training keeps
    them; otherwise they are copied. Raises ValueError when the members do not hold every element of a tensor.
    """
    held = [{slot.name: slot for slot in member.held} for member in members]
    holders = tensor_holders(tensors, held)
    plans = []
    for number, member in enumerate(members):
        plan = MemberPlan()
        for name in holders:
            own = held[number].get(name) if share_memory[number] else None
            plan.slots[name] = place_slot(plan, tensors[name], member.rollout_place, own)
        plans.append(plan)
    _find_pieces(plans, members, holders)
    return ExchangePlan(tensors, members, held, plans)


def tensor_holders(
    tensors: Mapping[str, LogicalTensor], held: Sequence[Mapping[str, Slot]]
) -> dict[str, list[Holders]]:
    """`segment_holders` of every tensor, by first appearance.

    Slots are laid out in this order, so tensors that lie together at their holder lie together at the receiver.
    """
    names = dict.fromkeys(name for slots in held for name in slots)
    return {name: segment_holders(tensors[name], held) for name in names}


def segment_holders(tensor: LogicalTensor, held: Sequence[Mapping[str, Slot]]) -> list[Holders]:
    """For each segment of a tensor its boxes and their holders. Raises ValueError when elements are missing."""
    found: list[dict[Box, list[int]]] = [{} for _ in tensor.segments]
    for number, slots in enumerate(held):
        if tensor.name in slots:
            for part in slots[tensor.name].shard.parts:
                found[part.segment].setdefault(part.box, []).append(number)
    for segment, boxes in zip(tensor.segments, found, strict=True):
        whole = tuple((0, size) for size in segment.shape)
        if sum(map(box_numel, boxes)) != box_numel(whole):
            raise ValueError(
                f"training holds {sum(map(box_numel, boxes))} of the {box_numel(whole)} elements of "
                f"{tensor.name}.{segment.name} in {len(boxes)} boxes"
            )
    return [{box: tuple(members) for box, members in boxes.items()} for boxes in found]


def aligned(numel: int) -> int:
    """Round elements up to where the next slot of a flat buffer starts."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


def place_slot(plan: MemberPlan, tensor: LogicalTensor, wanted: Place, own: Slot | None = None) -> Slot:
    """A rollout slot of one tensor: `own` where training keeps the same shard, or the next of the receive buffer."""
    shard = shard_of(tensor, wanted)
    if own is not None and own.shard == shard:
        return own
    offset = aligned(plan.foreign_numel)
    plan.foreign_numel = offset + shard.numel
    return Slot(tensor.name, FOREIGN, offset, shard)


Cut = tuple[int, Box, tuple[int, ...]]
"""(segment, box, members that hold the box): what can travel as one piece."""


def cuts(takers: Iterable[tuple[Slot, Sequence[int]]], segments: Sequence[Holders]) -> dict[Cut, list[int]]:
    """The pieces of the slots of one tensor along training's cuts, with the members whose slots contain them.

    takers: received slots, each with the members that have it. Members of a piece are in ascending order.
    """
    # Equal shards are one object (`shard_of`), which exists as long as its slot.
    alike: dict[int, tuple[Slot, list[int]]] = {}
    for slot, numbers in takers:
        alike.setdefault(id(slot.shard), (slot, []))[1].extend(numbers)
    found: dict[Cut, list[int]] = defaultdict(list)
    for slot, members in alike.values():
        for part in slot.shard.parts:
            for box, having in segments[part.segment].items():
                common = intersect(part.box, box)
                if common is not None:
                    found[part.segment, common, having].extend(members)
    return {cut: sorted(members) for cut, members in found.items()}


def _find_pieces(plans: list[MemberPlan], members: Sequence[Member], holders: Mapping[str, list[Holders]]) -> None:
    """Fill `local` and `received` of every plan; what is found for one layer's tensor holds for those alike."""
    known: dict[tuple[object, ...], tuple[list[Found], list[Found]]] = {}
    for name, segments in holders.items():
        takers = [
            (plan.slots[name], (number,)) for number, plan in enumerate(plans) if plan.slots[name].buffer == FOREIGN
        ]
        # Equal shards are one object (`shard_of`), which exists as long as its slot.
        key = (*((id(slot.shard), numbers) for slot, numbers in takers), *(tuple(held.items()) for held in segments))
        if key not in known:
            known[key] = _found(cuts(takers, segments), members)
        local, received = known[key]
        for segment, box, hop in local:
            plans[hop.dest].local.append(Piece(name, segment, box, *hop))
        for segment, box, hop in received:
            plans[hop.dest].received.append(Piece(name, segment, box, *hop))


def _found(pieces: Mapping[Cut, list[int]], members: Sequence[Member]) -> tuple[list[Found], list[Found]]:
    """The pieces that receivers copy from their own training shards, and those that others send them."""
    local, received = [], []
    for (segment, box, having), numbers in pieces.items():
        takers, holders = set(numbers), set(having)
        local += [(segment, box, Hop(number, number, 0, number)) for number in having if number in takers]
        lacking = [number for number in numbers if number not in holders]
        received += [(segment, box, hop) for hop in route(members, having, lacking)]
    return local, received


class Hop(NamedTuple):
    """The way of a piece to one receiver: the last fields of `Piece`."""

    source: int
    dest: int
    phase: int
    owner: int


Found = tuple[int, Box, Hop]
"""(segment, box, how it gets there)."""


def route(members: Sequence[Member], holders: Sequence[int], receivers: Sequence[int]) -> Iterator[Hop]:
    """One hop for each receiver of a piece: from a holder on its node, else through one rank there."""
    nodes = {members[holder].node for holder in holders}
    waiting: dict[int, list[int]] = defaultdict(list)
    for receiver in receivers:
        node = members[receiver].node
        if node in nodes:
            near = [holder for holder in holders if members[holder].node == node]
            owner = nearest(members, near, receiver)
            yield Hop(owner, receiver, 0, owner)
        else:
            waiting[node].append(receiver)
    for group in waiting.values():
        alike = fetchers(members, members[holders[0]].tp_rank, group)
        # Different pieces' holders choose different ranks, so that these share the work.
        first = alike[holders[0] % len(alike)]
        owner = nearest(members, holders, first)
        yield Hop(owner, first, 0, owner)
        yield from (Hop(first, receiver, 1, owner) for receiver in group if receiver != first)


def fetchers(members: Sequence[Member], tp_rank: int, group: Sequence[int]) -> Sequence[int]:
    """Return the receivers of a node that may fetch a piece: those at the TP coordinate of its first holder, or all."""
    return [receiver for receiver in group if members[receiver].tp_rank == tp_rank] or group


def nearest(members: Sequence[Member], holders: Sequence[int], receiver: int) -> int:
    """The holder to ask: one at the receiver's TP coordinate if there is one, then the one of nearest rank."""
    if len(holders) == 1:
        return holders[0]
    mine = members[receiver]
    return min(holders, key=lambda h: (members[h].tp_rank != mine.tp_rank, abs(members[h].rank - mine.rank), h))


def covers_training(plan: MemberPlan, held: Mapping[str, Slot]) -> bool:
    """Whether a member's receive buffer holds every element of its training shards, so that these may be dropped."""
    return all(
        plan.slots[name].buffer == FOREIGN
        and any(
            kept.segment == part.segment and intersect(kept.box, part.box) == part.box
            for kept in plan.slots[name].shard.parts
        )
        for name, slot in held.items()
        for part in slot.shard.parts
    )


def plan_memory(
    tensors: Mapping[str, LogicalTensor], members: Sequence[Member], number: int, drop_train_weights: bool
) -> tuple[ExchangePlan, bool]:
    """The exchange plan, and whether member `number` drops its training copy while generating.

    A member that shares all its shards with generation has nothing to drop, and keeps sharing them.
    """
    plan = make_plan(tensors, members, share_memory=[True] * len(members))
    if not drop_train_weights:
        return plan, False
    sharing = [set(held) <= mine.shared for held, mine in zip(plan.held, plan.plans, strict=True)]
    plan = make_plan(tensors, members, share_memory=sharing)
    for member, held, mine, shares in zip(members, plan.held, plan.plans, sharing, strict=True):
        if not shares and not covers_training(mine, held):
            raise ValueError(
                f"rank {member.rank} cannot drop its training weights: its shards for generation (tp_rank "
                f"{member.rollout_place.tp_rank} of {member.rollout_place.tp_size}) do not contain them"
            )
    return plan, not sharing[number]
