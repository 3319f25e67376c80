"""Count an exchange by structure: what `hybrid_engine.plan` would move, hold and pack, without all its pieces.

Tensors that are cut alike and whose training shards are with the same members are of one class. A class is cut once,
and its numbers count for each of its tensors: layers of one kind and stage. Boxes with the same holders and the same
takers are counted together, and members that receive the same shards share one layout. The pieces themselves are made
for those members alone whose messages are asked about. All counts are those of `plan_memory`, to the element.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from megatron_rl.hybrid_engine.layout import FOREIGN, Slot
from megatron_rl.hybrid_engine.plan import (
    Cut,
    Found,
    Member,
    MemberPlan,
    Piece,
    aligned,
    covers_training,
    cuts,
    fetchers,
    route,
    segment_holders,
)
from megatron_rl.hybrid_engine.schedule import longest_packed
from megatron_rl.parallel.sharding import LogicalTensor, Place, Shard, box_numel, shard_of

Moved = Mapping[tuple[tuple[int, ...], tuple[int, ...]], int]
"""(holders, takers) -> elements of all boxes that these hold and take."""


class TensorClass(NamedTuple):
    """A class: one of its tensors, their number, and the pieces into which it is cut, with the members that take each.

    at: place of the class in the list of all.
    """

    tensor: LogicalTensor
    names: list[str]
    pieces: Mapping[Cut, list[int]]
    at: int


class ExchangeCounts:
    """The numbers of one exchange inside an exchange group. A member is named by its place in `members`."""

    def __init__(
        self, tensors: Mapping[str, LogicalTensor], members: Sequence[Member], *, drop_train_weights: bool = False
    ) -> None:
        """Arguments are those of `plan_memory`. Raises ValueError as it does."""
        self.members = members
        self.tensors = tensors
        self._held = [{slot.name: slot for slot in member.held} for member in members]
        self._places = [member.rollout_place for member in members]
        self._own = [self._shared(number) for number in range(len(members))]
        if drop_train_weights:
            # Members that share all their shards with generation have nothing to drop.
            self._own = [own if len(own) == len(mine) else {} for own, mine in zip(self._own, self._held, strict=True)]
        self._names = dict.fromkeys(name for slots in self._held for name in slots)
        self._laid_out: dict[tuple[Place, frozenset[str]], dict[str, Slot]] = {}
        self._layouts: dict[int, dict[str, Slot]] = {}
        self._slots_of: dict[Place, list[tuple[str, Shard]]] = {}
        self._of_member: dict[tuple[int, int], list[Found]] = {}
        if drop_train_weights:
            self._refuse_losses()

    def _shared(self, number: int) -> dict[str, Slot]:
        """Return the slots that a member may read where training keeps them."""
        place, tensors = self._places[number], self.tensors
        held = self._held[number].items()
        return {name: slot for name, slot in held if slot.shard == shard_of(tensors[name], place)}

    def _refuse_losses(self) -> None:
        for number, member in enumerate(self.members):
            if len(self._own[number]) < len(self._held[number]) and not self.covers_training(number):
                raise ValueError(
                    f"rank {member.rank} cannot drop its training weights: its shards for generation (tp_rank "
                    f"{member.rollout_place.tp_rank} of {member.rollout_place.tp_size}) do not contain them"
                )

    def covers_training(self, number: int) -> bool:
        """Return whether a member's receive buffer holds every element of its training shards."""
        held, place = self._held[number], self._places[number]
        slots = {name: self._own[number].get(name) or self._foreign(name, place) for name in held}
        return covers_training(MemberPlan(slots), held)

    def _foreign(self, name: str, place: Place, offset: int = 0) -> Slot:
        return Slot(name, FOREIGN, offset, shard_of(self.tensors[name], place))

    # Classes

    @cached_property
    def classes(self) -> list[TensorClass]:
        """Every class once, by its first tensor."""
        holding: dict[str, list[tuple[int, int]]] = {name: [] for name in self._names}
        same: dict[Shard, int] = {}
        known: dict[int, int] = {}
        for number, slots in enumerate(self._held):
            for name, slot in slots.items():
                if id(slot.shard) not in known:
                    known[id(slot.shard)] = same.setdefault(slot.shard, len(same))
                holding[name].append((number, known[id(slot.shard)]))
        classes: dict[object, TensorClass] = {}
        for name, holders in holding.items():
            key = self.tensors[name].alike, tuple(holders)
            if key not in classes:
                classes[key] = TensorClass(self.tensors[name], [], self._cut(name), len(classes))
            classes[key].names.append(name)
        return list(classes.values())

    def _cut(self, name: str) -> dict[Cut, list[int]]:
        """Return the pieces of one tensor, with the members that take them."""
        takers: dict[Place, list[int]] = defaultdict(list)
        for number, place in enumerate(self._places):
            if name not in self._own[number]:
                takers[place].append(number)
        slots = [(self._foreign(name, place), numbers) for place, numbers in takers.items()]
        return cuts(slots, segment_holders(self.tensors[name], self._held))

    @cached_property
    def _class_of(self) -> dict[str, TensorClass]:
        return {name: alike for alike in self.classes for name in alike.names}

    # Elements that move

    @cached_property
    def _moved(self) -> Moved:
        moved: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
        for alike in self.classes:
            for (_, box, having), numbers in alike.pieces.items():
                moved[having, tuple(numbers)] += box_numel(box) * len(alike.names)
        return moved

    @cached_property
    def received_numels(self) -> list[int]:
        """Elements that each member receives."""
        received = [0] * len(self.members)
        for (having, takers), numel in self._moved.items():
            for number in set(takers).difference(having):
                received[number] += numel
        return received

    @cached_property
    def network_numels(self) -> list[int]:
        """Elements that each member receives from other nodes: one of a node's takers fetches a piece for all."""
        members, fetched = self.members, [0] * len(self.members)
        on_nodes: dict[tuple[int, ...], dict[int, list[int]]] = {}
        choices: dict[tuple[tuple[int, ...], int, int], Sequence[int]] = {}
        for (having, takers), numel in self._moved.items():
            if takers not in on_nodes:
                on_nodes[takers] = defaultdict(list)
                for number in takers:
                    on_nodes[takers][members[number].node].append(number)
            nodes, tp_rank = {members[number].node for number in having}, members[having[0]].tp_rank
            for node, group in on_nodes[takers].items():
                if node not in nodes:
                    key = takers, node, tp_rank
                    if key not in choices:
                        choices[key] = fetchers(members, tp_rank, group)
                    chosen = choices[key]
                    fetched[chosen[having[0] % len(chosen)]] += numel
        return fetched

    # Receive buffers

    @cached_property
    def receive_buffer_numels(self) -> list[int]:
        """Elements of each member's receive buffer."""
        known: dict[tuple[Place, frozenset[str]], int] = {}
        return [self._buffer_numel(number, known) for number in range(len(self.members))]

    def _buffer_numel(self, number: int, known: dict[tuple[Place, frozenset[str]], int]) -> int:
        place, own = self._places[number], frozenset(self._own[number])
        if (place, own) not in known:
            numels = [shard.numel for name, shard in self._shards(place) if name not in own]
            known[place, own] = sum(map(aligned, numels[:-1])) + sum(numels[-1:])
        return known[place, own]

    def _shards(self, place: Place) -> list[tuple[str, Shard]]:
        if place not in self._slots_of:
            self._slots_of[place] = [(name, shard_of(self.tensors[name], place)) for name in self._names]
        return self._slots_of[place]

    def _layout(self, number: int) -> dict[str, Slot]:
        """Return the slots of a member's receive buffer; one object for all members that receive the same."""
        if number not in self._layouts:
            place, own = key = self._places[number], frozenset(self._own[number])
            if key not in self._laid_out:
                slots, end = {}, 0
                for name, shard in self._shards(place):
                    if name not in own:
                        slots[name] = Slot(name, FOREIGN, aligned(end), shard)
                        end = aligned(end) + shard.numel
                self._laid_out[key] = slots
            self._layouts[number] = self._laid_out[key]
        return self._layouts[number]

    # Messages

    def source_slot(self, piece: Piece) -> Slot:
        """Return the slot from which the sender reads a piece."""
        return self._held[piece.source][piece.name] if piece.phase == 0 else self._layout(piece.source)[piece.name]

    def dest_slot(self, piece: Piece) -> Slot:
        """Return the slot to which the receiver writes a piece."""
        return self._layout(piece.dest)[piece.name]

    def most_packed(self, number: int, message_numel: int) -> int:
        """Return the elements of a member's longest message that needs scratch memory; 0: none does."""
        streams: dict[tuple[int, int, int], list[Piece]] = defaultdict(list)
        for name in self._names:
            for segment, box, hop in self._hops(self._class_of[name], number):
                piece = Piece(name, segment, box, *hop)
                side, peer = (0, hop.dest) if hop.source == number else (1, hop.source)
                streams[side, hop.phase, peer].append(piece)
        return longest_packed(self, [(side, pieces) for (side, *_), pieces in streams.items()], message_numel)

    def _hops(self, alike: TensorClass, number: int) -> list[Found]:
        """Return the pieces of a class that a member sends or receives."""
        if (alike.at, number) not in self._of_member:
            pieces = self._of_member[alike.at, number] = []
            nodes = [member.node for member in self.members]
            for (segment, box, having), takers in alike.pieces.items():
                if number in having or number in takers:
                    lacking = [taker for taker in takers if taker not in having]
                    if number not in having:  # it sends to ranks of its node alone
                        lacking = [taker for taker in lacking if nodes[taker] == nodes[number]]
                    hops = route(self.members, having, lacking)
                    pieces += [(segment, box, hop) for hop in hops if number in (hop.source, hop.dest)]
        return self._of_member[alike.at, number]


def packed_bytes(counts: ExchangeCounts, member: int, bucket: int, num_messages: int, element: int) -> int:
    """Return the most bytes of a member's packed messages in flight.

    bucket: bytes that all `num_messages` messages may have together. element: bytes of one element.
    """
    return num_messages * counts.most_packed(member, max(1, bucket // element // num_messages)) * element
