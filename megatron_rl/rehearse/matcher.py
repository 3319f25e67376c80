"""Do the calls of all ranks fit together? A simulation of what ranks recorded, rank by rank. No torch, no processes.

A rank goes through its calls in their order, and waits at each until all of the group have come to theirs, or the other
side of every message that was posted with it. Streams may run ahead of that, so a run could pass where this does not;
what passes here cannot hang in a run whose collectives complete in the order of their calls.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.rehearse.group_calls import SEND, GroupCall

UNEVEN_CALLS = ("alltoall_base", "alltoall")
"""Calls whose tensors may have another number of elements on each rank."""


@dataclass(frozen=True)
class RankCall:
    """A call and the rank that made it."""

    rank: int
    call: GroupCall

    def __str__(self) -> str:
        return f"rank {self.rank}'s {self.call} in {self.call.phase}"


@dataclass(frozen=True)
class CallDifference:
    """Two calls that meet each other and do not fit: in operation, reduction, size, type, device, root or purpose of
    their groups.
    """

    first: RankCall
    second: RankCall

    def __str__(self) -> str:
        one, other = self.first.call, self.second.call
        both = f"{self.first} meets {self.second}"
        if one.reduction != other.reduction:
            return f"{both}: one reduces by {one.reduction or 'nothing'}, the other by {other.reduction or 'nothing'}"
        if one.purpose != other.purpose:
            return f"{both}: one is of {one.purpose or 'a group'}, the other of {other.purpose or 'another group'}"
        return both


@dataclass(frozen=True)
class Waiting:
    """A rank that goes no further: the call at which it waits, and the ranks that never come to theirs."""

    at: RankCall
    absent: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.at} waits for {ranks_text(self.absent)}"


@dataclass(frozen=True)
class Match:
    """The end of a simulation.

    num_calls: that completed. differences: in the order of their meeting. waiting: ranks that never end. ended: ranks
    that do.
    """

    num_calls: int
    differences: tuple[CallDifference, ...]
    waiting: tuple[Waiting, ...]
    ended: frozenset[int]

    @property
    def fits(self) -> bool:
        """Whether all ranks end, and all calls agree."""
        return not (self.differences or self.waiting)

    def first_differences(self, most: int = 3) -> list[str]:
        """Return the first calls that do not fit: all that counts where a rank has failed, for which others wait."""
        return _first(self.differences, most)

    def cycle(self) -> list[Waiting]:
        """Return ranks of which each waits for the next, and the last for the first; empty if there are none."""
        waits = {one.at.rank: one for one in self.waiting}
        for start in waits:
            path: list[int] = []
            rank = start
            while rank in waits and rank not in path:
                path.append(rank)
                rank = next((absent for absent in waits[rank].absent if absent in waits), -1)
            if rank in path:
                return [waits[one] for one in path[path.index(rank) :]]
        return []

    def sentences(self, most: int = 8) -> list[str]:
        """Return what is wrong, the first `most` of each kind; empty where all fits."""
        found = _first(self.differences, most)
        cycle = self.cycle()
        if cycle:
            ranks = ", ".join(str(one.at.rank) for one in cycle)
            found.append(
                f"ranks {ranks} wait for each other, the last one for the first: " + "; ".join(map(str, cycle))
            )
        # Who waits for a rank that has ended is nearer to the cause than who waits for one that waits.
        order = sorted(self.waiting, key=lambda one: not self.ended.intersection(one.absent))
        in_cycle = {one.at.rank for one in cycle}
        return found + _first([one for one in order if one.at.rank not in in_cycle], most)


def _first(found: Sequence[object], most: int) -> list[str]:
    more = [f"and {len(found) - most} more like these"] if len(found) > most else []
    return [str(one) for one in found[:most]] + more


def ranks_text(ranks: Sequence[int], most: int = 6) -> str:
    """Return "rank 3", or "ranks 3, 4", at most that many of them."""
    shown = ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def match_calls(calls: Mapping[int, Sequence[GroupCall]]) -> Match:
    """Return how the calls of these ranks of one world continue together. calls: rank -> its calls, in their order.

    A rank that does not exist is taken to agree with everything.
    """
    simulation = _Simulation(calls)
    simulation.run()
    return simulation.match()


@dataclass
class _Message:
    """A send or receive that has been posted."""

    made: RankCall
    is_done: bool = False


@dataclass
class _Progress:
    """Where a rank is: the steps that it has yet to finish, and what it has posted of the present one."""

    steps: deque[tuple[GroupCall, ...]]
    posted: list[_Message] = field(default_factory=list)


class _Simulation:
    """All ranks, each advanced as far as the others let it."""

    def __init__(self, calls: Mapping[int, Sequence[GroupCall]]) -> None:
        self._ranks = {rank: _Progress(_steps(made)) for rank, made in calls.items()}
        self._arrived: dict[tuple[int, ...], dict[int, GroupCall]] = defaultdict(dict)
        self._unmatched: dict[tuple[tuple[int, ...], int, int, str], deque[_Message]] = defaultdict(deque)
        self._runnable: deque[int] = deque(calls)
        self._num_calls = 0
        self._differences: list[CallDifference] = []

    def run(self) -> None:
        """Advance ranks until none can be advanced."""
        while self._runnable:
            rank = self._runnable.popleft()
            while self._ranks[rank].steps and self._step(rank, self._ranks[rank]):
                pass

    def _step(self, rank: int, progress: _Progress) -> bool:
        """Come to the present step, or look whether it is done; returns whether the rank continues by itself."""
        step = progress.steps[0]
        if not step[0].is_message:
            return self._arrive(rank, step[0])
        if not progress.posted:
            progress.posted = [self._post(rank, call) for call in step]
        if not all(message.is_done for message in progress.posted):
            return False
        progress.posted = []
        self._num_calls += len(step)
        progress.steps.popleft()
        return True

    def _arrive(self, rank: int, call: GroupCall) -> bool:
        key = tuple(sorted(call.group)) or tuple(sorted(self._ranks))
        arrived = self._arrived[key]
        if rank in arrived:  # asked again, by a message that was none of this step's
            return False
        arrived[rank] = call
        if any(mate not in arrived for mate in key if mate in self._ranks):
            return False
        first, *others = (RankCall(mate, arrived[mate]) for mate in sorted(arrived))
        self._differences += [CallDifference(first, other) for other in others if not _agree(first.call, other.call)]
        for mate in arrived:
            self._ranks[mate].steps.popleft()
            self._num_calls += 1
        self._runnable += [mate for mate in arrived if mate != rank]
        arrived.clear()
        return True

    def _post(self, rank: int, call: GroupCall) -> _Message:
        message = _Message(RankCall(rank, call))
        peer = call.peer
        assert peer is not None
        if peer not in self._ranks:
            message.is_done = True
            return message
        source, target = (rank, peer) if call.name == SEND else (peer, rank)
        group = tuple(sorted(call.group))
        others = self._unmatched[group, source, target, "of the receiver" if call.name == SEND else "of the sender"]
        if not others:
            own = "of the sender" if call.name == SEND else "of the receiver"
            self._unmatched[group, source, target, own].append(message)
            return message
        other = others.popleft()
        message.is_done = other.is_done = True
        if (other.made.call.sizes, other.made.call.purpose) != (call.sizes, call.purpose):
            self._differences.append(CallDifference(message.made, other.made))
        self._runnable.append(peer)
        return message

    def match(self) -> Match:
        """Return where all ranks have come to."""
        waiting = [self._waiting(rank, progress) for rank, progress in sorted(self._ranks.items()) if progress.steps]
        ended = frozenset(rank for rank, progress in self._ranks.items() if not progress.steps)
        return Match(self._num_calls, tuple(self._differences), tuple(waiting), ended)

    def _waiting(self, rank: int, progress: _Progress) -> Waiting:
        call = progress.steps[0][0]
        if not call.is_message:
            key = tuple(sorted(call.group)) or tuple(sorted(self._ranks))
            absent = [mate for mate in key if mate in self._ranks and mate not in self._arrived[key]]
            return Waiting(RankCall(rank, call), tuple(absent))
        open_messages = [message for message in progress.posted if not message.is_done]
        peers = dict.fromkeys(message.made.call.peer for message in open_messages)
        return Waiting(open_messages[0].made, tuple(peer for peer in peers if peer is not None))


def _kind(call: GroupCall) -> tuple[object, ...]:
    return call.name, call.root, call.reduction, call.purpose, len(call.sizes)


def _agree(first: GroupCall, second: GroupCall) -> bool:
    if _kind(first) != _kind(second):
        return False
    if first.name in UNEVEN_CALLS:
        return [(size.dtype, size.device) for size in first.sizes] == [
            (size.dtype, size.device) for size in second.sizes
        ]
    return first.sizes == second.sizes


def _steps(calls: Sequence[GroupCall]) -> deque[tuple[GroupCall, ...]]:
    """Return calls that are made one after the other; messages that are posted at once are one step."""
    steps: list[list[GroupCall]] = []
    for call in calls:
        if call.batch is not None and steps and steps[-1][-1].batch == call.batch:
            steps[-1].append(call)
        else:
            steps.append([call])
    return deque(map(tuple, steps))
