"""Replay a recorded schedule whose batches only kept groups complete (dynamic sampling)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_rl.errors import ReplayError
from megatron_rl.sampling.filtered_requests import FilteredGroups
from megatron_rl.sampling.journal import Event, StepTaken
from megatron_rl.sampling.replay import Replay
from megatron_rl.sampling.schedule_types import GroupsJoined, GroupSwap, Judged, ScheduleConfig, Verdict
from megatron_rl.sampling.verdicts import GroupVerdicts


class FilteredReplay(Replay):
    """Groups join batches, and are dropped, as recorded. Verdicts must be those that were recorded."""

    groups: FilteredGroups
    verdicts: GroupVerdicts

    def __init__(self, rules: ScheduleConfig, num_replicas: int, events: Sequence[Event]) -> None:
        super().__init__(rules, num_replicas, events)
        self.verdicts = self  # it has them
        self._recorded = {event.group: event.verdict for event in events if isinstance(event, Judged)}
        self._dropped = {event.step: event.dropped for event in events if isinstance(event, StepTaken)}
        self._members: dict[int, list[int]] = {}
        self._joined: list[GroupsJoined] = []
        self._joined_before: dict[int, int] = {}
        record = FilteredGroups(rules.group_size)
        for event in events:
            if isinstance(event, GroupsJoined):
                self._joined.append(event)
                record.join(event)
            elif isinstance(event, StepTaken):
                self._joined_before[event.step] = len(self._joined)
                judged = [group for group in record.of(event.step) if group in self._recorded]
                self._members[event.step] = judged
        self._num_joined = self._num_told = 0
        self._done: Counter[int] = Counter()
        self._unjudged: set[int] = set()

    @property
    def unjudged(self) -> set[int]:
        return self._unjudged

    def open_groups(self) -> None:
        """Let the recorded groups join that the next slices start."""
        waiting = [
            slices[number].order.starts
            for slices, number in zip(self._slices, self._num_given, strict=True)
            if number < len(slices)
        ]
        last = max((request // self.rules.group_size for starts in waiting for request in starts), default=-1)
        while self.groups.next_group <= last and self._num_joined < len(self._joined):
            self._join_next()

    def take_joined(self) -> Sequence[GroupsJoined]:
        joined = self._joined[self._num_told : self._num_joined]
        self._num_told = self._num_joined
        return joined

    def judged(self, group: int, verdict: Verdict) -> None:
        """Raises ReplayError for another verdict than the recorded one."""
        if self._recorded.get(group, verdict) != verdict:
            raise ReplayError(f"group {group} was {self._recorded[group]} in the recorded run, and is {verdict} now")
        self._unjudged.discard(group)
        self.groups.verdicts[group] = verdict

    def is_complete(self, step: int) -> bool:
        """Whether all groups that the recorded run had judged when it took batch `step` are judged. Raises ReplayError
        if it ended before that.
        """
        if step in self._members and self.groups.verdicts.keys() >= set(self._members[step]):
            return True
        if self._has_ended and not self.away and (step not in self._members or not self._unjudged):
            raise ReplayError(f"the recorded schedule ends before batch {step} is complete")
        return False

    def step_taken(self, step: int) -> GroupSwap | None:
        while self._num_joined < self._joined_before[step]:
            self._join_next()
        for group in self._dropped[step]:
            self.groups.drop(group)
        self.groups.forget(step)
        return super().step_taken(step)

    def state_dict(self) -> dict[str, Any]:
        state, verdicts = super().state_dict(), self.groups.verdicts
        del state["next_new"]
        groups = [[group, at, self.groups.salt_of(group), verdicts.get(group), None] for group, at in self.groups.moved]
        last = self.rules.num_steps_total
        return state | {"opened": last, "next_group": self.groups.next_group, "groups": groups, "fresh": []}

    def _join_next(self) -> None:
        self.groups.join(self._joined[self._num_joined])
        self._num_joined += 1

    def _finish(self, requests: Sequence[int]) -> None:
        size = self.rules.group_size
        self._done.update(request // size for request in requests)
        self._unjudged |= {request // size for request in requests if self._done[request // size] == size}

    @property
    def _is_drawn(self) -> bool:
        return self._has_ended and not self._unjudged
