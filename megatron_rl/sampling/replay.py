"""Replay a recorded schedule: every replica gets its recorded slices in their order.

Times may differ from the recorded ones, but what each engine does may not. So a slice waits until its weights have
arrived and until requests that come from another replica have their recorded tokens. A replica that was lost in the
recorded run stays alive here: its next slice drops its requests, and they continue on the replica that took them over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.errors import ReplayError
from megatron_rl.sampling.filtered_requests import FilteredGroups
from megatron_rl.sampling.group_map import GroupMap, move_groups
from megatron_rl.sampling.journal import Counted, Event, Interrupted, ReplicaLost, Resumed, SliceDone, StepTaken
from megatron_rl.sampling.schedule_types import (
    Counts,
    GroupsJoined,
    GroupSwap,
    Numbers,
    RequestDecision,
    ScheduleConfig,
    SliceOrder,
)
from megatron_rl.sampling.verdicts import GroupVerdicts, NoVerdicts


@dataclass
class _Slice:
    """A recorded slice. needs: replica -> number of its slices that must be done first. decisions: those made
    after it.
    """

    order: SliceOrder
    finished: tuple[int, ...]
    away: tuple[int, ...] = ()
    needs: dict[int, int] = field(default_factory=dict)
    decisions: list[RequestDecision] = field(default_factory=list)


class _JournalReader:
    """Turns events into the slices of each replica. groups: the batch that trains each group, after all events."""

    def __init__(self, rules: ScheduleConfig) -> None:
        self.rules = rules
        self.groups = groups_of(rules)
        self.slices: dict[int, list[_Slice]] = defaultdict(list)
        self.finished: list[int] = []
        self.decisions: list[RequestDecision] = []
        self.interruptions: list[dict[int, int]] = []
        self.swaps: dict[int, GroupSwap] = {}
        self._inside: dict[int, set[int]] = defaultdict(set)
        self._abandoned: dict[int, set[int]] = defaultdict(set)
        self._owner: dict[int, int] = {}
        self._left_after: dict[int, int] = {}
        self._away_since: dict[int, int] = {}

    def read(self, event: Event) -> None:
        """Read the next event; events that decide nothing are skipped."""
        match event:
            case SliceDone():
                self._read_slice(event)
            case Interrupted():
                self.interruptions.append({replica: len(slices) for replica, slices in self.slices.items()})
            case GroupSwap():
                self.swaps[self.groups.batch_of(event.late[0])] = event
                move_groups(self.groups, event)
                if self.rules.colocated:  # the engines are empty
                    self._inside.clear()
            case GroupsJoined() if isinstance(self.groups, FilteredGroups):
                self.groups.join(event)
            case StepTaken() if isinstance(self.groups, FilteredGroups):
                for group in event.dropped:
                    self.groups.drop(group)
            case ReplicaLost():
                self._lose(event.replica)
            case Resumed():
                for replica in list(self._inside):
                    self._lose(replica)
            case RequestDecision():
                slices = self.slices[self._owner[event.request]] if event.request in self._owner else []
                if event.request in self._away_since:  # before the reply to its turn could come
                    slices = slices[: self._away_since[event.request]]
                (slices[-1].decisions if slices else self.decisions).append(event)

    def forget_slices(self) -> None:
        """Take all slices read so far as done, with their tokens: only the finished requests are kept."""
        done = [(known.finished, known.decisions) for slices in self.slices.values() for known in slices]
        for finished, decisions in done:
            self.finished += [*finished, *(one.request for one in decisions if one.kind == "truncate")]
        for known in (
            *(self.slices, self._inside, self._abandoned),
            *(self._owner, self._left_after, self._away_since),
        ):
            known.clear()
        self.interruptions = []
        self.decisions = []

    def drop_the_abandoned(self) -> None:
        """Add a slice of no steps that drops the requests of replicas that never came back."""
        for replica, requests in self._abandoned.items():
            if requests:
                version = self.slices[replica][-1].order.version
                self.slices[replica].append(_Slice(SliceOrder(replica, version, 0, (), tuple(sorted(requests))), ()))

    def _lose(self, replica: int) -> None:
        for request in self._inside[replica]:
            self._left_after[request] = len(self.slices[replica])
        self._abandoned[replica] |= self._inside[replica]
        self._inside[replica] = set()

    def _read_slice(self, event: SliceDone) -> None:
        replica, slices = event.replica, self.slices[event.replica]
        if slices and event.version < slices[-1].order.version:
            raise ReplayError(
                f"replica {replica} went from version {slices[-1].order.version} back to {event.version} when it was "
                "restarted: an engine that was not restarted cannot repeat this"
            )
        if not self.rules.sends(event.version):
            raise ReplayError(f"version {event.version} is none that sync_every={self.rules.sync_every} sends")
        needs: dict[int, int] = {}
        for request in event.starts:
            other = self._owner.get(request, replica)
            if other != replica:
                needs[other] = max(needs.get(other, 0), self._left_after[request])
            self._owner[request] = replica
            self._away_since.pop(request, None)
        held = slices[-1].order.version if slices else self.rules.first_step - 1
        if self.rules.colocated and event.version != held:  # the engine was offloaded, and so is empty
            self._inside[replica].clear()
            self._abandoned.pop(replica, None)
        drops = tuple(sorted(self._abandoned.pop(replica, set()).union(event.drops)))
        order = SliceOrder(replica, event.version, event.num_steps, event.starts, drops)
        slices.append(_Slice(order, event.finished, event.away, needs))
        inside = self._inside[replica]
        inside.difference_update(event.drops)
        inside.update(event.starts)
        inside.difference_update(event.finished, event.away)
        self._left_after |= dict.fromkeys(event.away, len(slices))
        self._away_since |= dict.fromkeys(event.away, len(slices))


class Replay:
    """A scheduler that repeats recorded decisions.

    Raises ReplayError if the run differs from the recorded one; the message names the slice and the difference.
    """

    def __init__(self, rules: ScheduleConfig, num_replicas: int, events: Sequence[Event], num_done: int = 0) -> None:
        """num_done: number of events before the checkpoint; the later ones are replayed, from empty engines.

        Raises ReplayError if the events need more than `num_replicas`, or cannot be replayed at all.
        """
        self.rules = rules
        self._counted = deque(event.counts for event in events[num_done:] if isinstance(event, Counted))
        self._counts_itself = not self._counted  # an older schedule, of which only decisions can be counted
        self.counts: dict[str, int] = {"truncated": 0, "resampled": 0}
        reader = _JournalReader(rules)
        for number, event in enumerate(events):
            if number == num_done > 0:
                reader.forget_slices()
            reader.read(event)
        if num_done >= len(events):
            reader.forget_slices()
        reader.drop_the_abandoned()
        if max(reader.slices, default=0) >= num_replicas:
            raise ReplayError(f"the schedule has {max(reader.slices) + 1} replicas, this run has {num_replicas}")
        self._slices = [reader.slices[replica] for replica in range(num_replicas)]
        self._versions = [sorted({known.order.version for known in slices}) for slices in self._slices]
        self.groups = groups_of(rules)
        self.verdicts: GroupVerdicts = NoVerdicts()
        self._trained_in = reader.groups.batch_of
        self._num_finished = Counter(self._trained_in(request) for request in reader.finished)
        self._swaps = reader.swaps
        self._decisions = reader.decisions
        self._interruptions = deque(
            [before.get(replica, 0) for replica in range(num_replicas)] for before in reader.interruptions
        )
        self.away: set[int] = set()
        self.admits = True  # without effect: the record says when requests start
        self._num_given = [0] * num_replicas
        self._num_done = [0] * num_replicas
        self._held = [rules.first_step - 1] * num_replicas
        self._ready = rules.first_step - 1

    def next_order(self, replica: int) -> SliceOrder | None:
        """The next recorded slice, once it is possible."""
        number = self._num_given[replica]
        if number > self._num_done[replica] or number == len(self._slices[replica]):
            return None
        if self._interruptions and number >= self._interruptions[0][replica]:
            return None
        known = self._slices[replica][number]
        waits = any(self._num_done[other] < num for other, num in known.needs.items())
        waits = waits or bool(self.away & set(known.order.starts))
        if waits or known.order.version > max(self._held[replica], self._ready):
            return None
        self._num_given[replica] += 1
        self._held[replica] = known.order.version
        return known.order

    def slice_done(self, replica: int, num_steps: int, tokens: Counts, finished: Numbers, away: Numbers = ()) -> None:
        """Raises ReplayError if engine steps, or requests that ended or went away, differ from the recorded ones."""
        number = self._num_done[replica]
        if number == self._num_given[replica]:
            raise ValueError(f"replica {replica} has no outstanding order")
        known = self._slices[replica][number]
        now = (num_steps, tuple(sorted(finished)), tuple(sorted(away)))
        recorded = (known.order.num_steps, known.finished, known.away)
        if now != recorded:
            raise ReplayError(
                f"slice {number} of replica {replica}, version {known.order.version}: recorded were "
                f"{_in_words(recorded)}, now there are {_in_words(now)}"
            )
        self.away.update(away)
        self._num_done[replica] += 1
        self._decisions += known.decisions
        ended = list(known.finished)
        for decision in known.decisions:
            self.counts["truncated"] += self._counts_itself and decision.kind == "truncate"
            self.counts["resampled"] += self._counts_itself and decision.kind == "resample"
            ended += [decision.request] if decision.kind == "truncate" else []
            self.away.discard(decision.request)
        self._finish(ended)

    def returned(self, request: int, is_finished: bool) -> None:
        """A request that was away has the reply to its turn."""
        self.away.remove(request)
        if is_finished:
            self._finish([request])

    def _finish(self, requests: Sequence[int]) -> None:
        self._num_finished.update(self._trained_in(request) for request in requests)

    def is_complete(self, step: int) -> bool:
        """Whether batch `step` is finished. Raises ReplayError if the recorded run ended before that."""
        if self._num_finished[step] == self.rules.batch_rows:
            return not self.rules.colocated or self._has_done(step - 1)
        if self._has_ended and not self.away:
            raise ReplayError(f"the recorded schedule ends before batch {step} is complete")
        return False

    def _has_done(self, version: int) -> bool:
        """Whether no recorded slice of a version is left: a turn that is answered earlier must not skip some."""
        return not any(
            known.order.version <= version
            for num, slices in zip(self._num_done, self._slices, strict=True)
            for known in slices[num : num + 1]
        )

    @property
    def _has_ended(self) -> bool:
        """Whether all recorded slices are done."""
        return all(num == len(slices) for num, slices in zip(self._num_done, self._slices, strict=True))

    @property
    def _is_drawn(self) -> bool:
        """Whether every request of the run is finished."""
        return self._num_finished.total() == self.rules.num_steps_total * self.rules.batch_rows

    def take_decisions(self) -> Sequence[RequestDecision]:
        """Recorded decisions after the slices done since the last call."""
        decisions, self._decisions = self._decisions, []
        return decisions

    def sending(self, version: int) -> None:
        """Nothing to do: `may_send` makes sure that no earlier version is missed."""

    def version_ready(self, version: int) -> None:
        """All replicas have received the weights of `version`."""
        self._ready = max(self._ready, version)

    def step_taken(self, step: int) -> GroupSwap | None:
        """Take the recorded `counts` of this step, because lost replicas and checkpoints are not repeated; returns its
        recorded swap.
        """
        if self._counted:
            self.counts.update(self._counted.popleft())
        swap = self._swaps.pop(step, None)
        if swap is not None:
            move_groups(self.groups, swap)
        return swap

    def saved(self, step: int, interrupted: bool = False) -> None:
        """The recorded orders say which requests restart; after an interruption they continue."""
        if interrupted and self._interruptions:
            self._interruptions.popleft()

    def replica_lost(self, replica: int) -> None:
        """Raises ReplayError: a loss that was not recorded cannot be replayed."""
        raise ReplayError(f"replica {replica} was lost while a recorded schedule was repeated")

    def replica_back(self, replica: int, version: int) -> None:
        """Raises ReplayError."""
        raise ReplayError(f"replica {replica} came back while a recorded schedule was repeated")

    def wanted_version(self, replica: int) -> int | None:
        """The version of the next recorded slice, if it has not arrived yet."""
        number = self._num_given[replica]
        if number > self._num_done[replica] or number == len(self._slices[replica]):
            return None
        version = self._slices[replica][number].order.version
        return version if version > max(self._held[replica], self._ready) else None

    def may_send(self, version: int) -> bool:
        """Whether every replica has taken all earlier versions that its recorded slices name."""
        for held, versions in zip(self._held, self._versions, strict=True):
            following = bisect_right(versions, held)
            if following < len(versions) and versions[following] < version:
                return False
        return True

    def may_save(self, step: int) -> bool:
        """Whether all slices before the next recorded interruption are done."""
        return not self._interruptions or self._num_done == self._interruptions[0]

    def state_dict(self) -> dict[str, Any]:
        """Raises ReplayError before everything is drawn: restarted engines would not give the same bits."""
        if not self._is_drawn:
            raise ReplayError(
                "a run that repeats a recorded schedule cannot be saved before its last batch is generated"
            )
        last, rows = self.rules.num_steps_total, self.rules.batch_rows
        state: dict[str, Any] = {"batch_rows": rows, "taken": last, "next_new": last * rows, "open": []}
        versions = [[held, self._ready] for held in self._held]
        return state | {"versions": versions, "announced": self._ready, "counts": dict(self.counts)}


def groups_of(rules: ScheduleConfig) -> GroupMap:
    """The groups of a schedule at its beginning."""
    return FilteredGroups(rules.group_size) if rules.kept_groups else GroupMap(rules.num_groups, rules.group_size)


def _in_words(facts: tuple[int | None, tuple[int, ...], tuple[int, ...]]) -> str:
    num_steps, finished, away = facts
    ends = f" and turns that ended of {list(away)}" if away else ""
    return f"{num_steps} engine steps, finished requests {list(finished)}{ends}"
