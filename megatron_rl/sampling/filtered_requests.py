"""Dynamic sampling: the requests of batches that only groups with the verdict "kept" complete.

A batch begins with `num_groups` groups. Each gets a verdict once its responses are scored. While a batch cannot have
`kept_groups` kept ones any more, further groups join it, up to `max_groups`; then the others fill it up. Kept groups
that a batch does not need, and groups that are not judged when it has enough, go to the next batch if they are young
enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_rl.sampling.group_map import GroupMap
from megatron_rl.sampling.requests import Request, Requests
from megatron_rl.sampling.schedule_types import SALT_STRIDE, GroupsJoined, ScheduleConfig, Verdict


class FilteredGroups(GroupMap):
    """The batch of every group from its beginning until its batch is trained.

    next_group: the number of the group that begins next. verdicts: on groups of batches that are not forgotten.
    """

    def __init__(self, group_size: int) -> None:
        super().__init__(1, group_size)
        self.next_group = 0
        self.verdicts: dict[int, Verdict] = {}
        self._salts: dict[int, int] = {}
        self._dropped: dict[int, int] = {}

    def first_batch(self, group: int) -> int:
        return self._salts[group] % SALT_STRIDE

    def batch_of(self, request: int) -> int:
        """Return the batch that a request belongs to now, or that has dropped it; 0 for one that is forgotten."""
        group = request // self.group_size
        return self._moved[group] if group in self._moved else self._dropped.get(group, 0)

    def of(self, batch: int) -> list[int]:
        return sorted(group for group, at in self._moved.items() if at == batch)

    def kept(self, batch: int) -> list[int]:
        """Return the groups of a batch that are kept, in the order of their numbers."""
        return [group for group in self.of(batch) if self.verdicts.get(group) == "kept"]

    def pending(self, batch: int) -> list[int]:
        """Return the groups of a batch that have no verdict."""
        return [group for group in self.of(batch) if group not in self.verdicts]

    def num_begun(self, batch: int) -> int:
        """Return how many groups have begun for a batch that is not forgotten."""
        return sum(salt % SALT_STRIDE == batch for salt in self._salts.values())

    def first_live(self, step: int) -> int:
        """Return the first group that a step after this one may train."""
        return min((group for group, at in self._moved.items() if at > step), default=self.next_group)

    def salt_of(self, group: int) -> int:
        """Return the salt of a group's seeds."""
        return self._salts[group]

    def join(self, joined: GroupsJoined) -> None:
        """Groups begin, or go to another batch."""
        for group in range(joined.first, joined.first + joined.num):
            self._moved[group] = joined.batch
            self._salts[group] = joined.salt
        self.next_group = max(self.next_group, joined.first + joined.num)

    def drop(self, group: int) -> None:
        """The group is not trained."""
        self._dropped[group] = self._moved.pop(group)

    def dropped(self, batch: int) -> list[int]:
        """Return the groups that a batch has dropped."""
        return sorted(group for group, at in self._dropped.items() if at == batch)

    def forget(self, batch: int) -> None:
        self._moved = {group: at for group, at in self._moved.items() if at >= batch}
        self._dropped = {group: at for group, at in self._dropped.items() if at >= batch}
        held = self._moved.keys() | self._dropped.keys()
        self._salts = {group: salt for group, salt in self._salts.items() if group in held}
        self.verdicts = {group: verdict for group, verdict in self.verdicts.items() if group in held}


class FilteredRequests(Requests):
    """Hands requests out in the order of their batches.

    unjudged: groups whose responses are all finished. joined: what has happened to the groups since it was emptied.
    """

    groups: FilteredGroups

    def __init__(self, rules: ScheduleConfig) -> None:
        super().__init__(rules)
        self.groups = FilteredGroups(rules.group_size)
        self.unjudged: set[int] = set()
        self.joined: list[GroupsJoined] = []
        self.opened = self.taken
        self._said: dict[int, Verdict] = {}
        self._left: dict[int, int] = {}
        self._fresh: list[int] = []

    @property
    def _continues(self) -> bool:
        # The first batch goes first: a later one may have to wait for versions that the first one makes possible.
        back, fresh = self._given_back, self._fresh
        return bool(back) and (not fresh or self.groups.batch_of(back[0]) <= self.groups.batch_of(fresh[-1]))

    def _place(self, request: int) -> tuple[int, int]:
        return self.groups.batch_of(request), request

    def head(self) -> int | None:
        if self._continues:
            return self._given_back[0]
        return self._fresh[-1] if self._fresh else None

    def next_batch(self) -> int | None:
        head = self.head()
        if head is not None:
            return self.groups.batch_of(head)
        return self.opened + 1 if self.opened < self.rules.num_steps_total else None

    def may_start(self, request: int, version: int) -> bool:
        return self.groups.batch_of(request) <= self.rules.last_batch(version)

    def num_waiting(self, version: int) -> int:
        return sum(self.may_start(request, version) for request in (*self._given_back, *self._fresh))

    def finish(self, request: int) -> None:
        del self.open[request]
        group = request // self.rules.group_size
        self._left[group] -= 1
        if not self._left[group]:
            self.unjudged.add(group)

    def num_missing(self, batch: int) -> int:
        return sum(self._left[group] for group in self.groups.of(batch))

    def is_complete(self, batch: int) -> bool:
        return batch < self.frontier or (batch <= self.opened and not self.groups.pending(batch))

    # Groups

    def open_batches(self, last: int) -> None:
        """Begin all batches up to this one."""
        while self.opened < last:
            self.opened += 1
            self._begin(self.opened, max(0, self.rules.num_groups - len(self.groups.of(self.opened))))
            self._settle(self.opened)
        self._advance()

    def judge(self, group: int, verdict: Verdict) -> None:
        """Take the verdict on a group in `unjudged`, which `apply_verdicts` lets take effect."""
        self._said[group] = verdict

    @property
    def has_all_verdicts(self) -> bool:
        """Whether every group in `unjudged` has a verdict."""
        return self._said.keys() == self.unjudged

    def apply_verdicts(self) -> dict[int, Verdict]:
        """Let groups join or leave batches, in the order of the judged groups; return the new verdicts."""
        effective, self._said = dict(sorted(self._said.items())), {}
        self.groups.verdicts |= effective
        self.unjudged -= effective.keys()
        for batch in sorted({self.groups.batch_of(group * self.rules.group_size) for group in effective}):
            self._settle(batch)
        self._advance()
        return effective

    def budget(self, batch: int) -> int:
        """Return how many more groups may begin for a batch."""
        return max(0, self.rules.max_groups - self.groups.num_begun(batch)) if self.rules.max_groups else 10**9

    def take(self, batch: int) -> None:
        kept = self.groups.kept(batch)
        others = [group for group in self.groups.of(batch) if group not in kept]
        for group in (*kept, *others)[self.rules.kept_groups :]:
            self.groups.drop(group)
        self.taken = batch
        self.groups.forget(batch)
        self._sort()
        held = {group for group, _ in self.groups.moved}
        self._left = {group: num for group, num in self._left.items() if group in held}
        self._begun_under = {group: version for group, version in self._begun_under.items() if group in held}

    def _begin(self, batch: int, num: int) -> None:
        """New groups begin for a batch; every `num_groups` of them have another salt."""
        while num > 0:
            generation, used = divmod(self.groups.num_begun(batch), self.rules.num_groups)
            part, first = min(num, self.rules.num_groups - used), self.groups.next_group
            self._join(batch, first, part, batch + SALT_STRIDE * generation)
            self._left |= dict.fromkeys(range(first, first + part), self.rules.group_size)
            self._fresh += range(first * self.rules.group_size, (first + part) * self.rules.group_size)
            num -= part
        self._sort()

    def _join(self, batch: int, first: int, num: int, salt: int) -> None:
        self.joined.append(GroupsJoined(batch, first, num, salt))
        self.groups.join(self.joined[-1])

    def _sort(self) -> None:
        self._given_back.sort(key=self._place)
        self._fresh.sort(key=self._place, reverse=True)

    def _settle(self, batch: int) -> None:
        """Let groups join or leave a batch, as the verdicts on its groups ask for."""
        if not self.taken < batch <= self.opened:
            return
        kept, pending, wanted = self.groups.kept(batch), self.groups.pending(batch), self.rules.kept_groups
        if len(kept) >= wanted:
            self._pass_on(batch, [*kept[wanted:], *pending])
        elif self.rules.ahead:
            self._begin(batch, min(wanted - len(kept) - len(pending), self.budget(batch)))
        elif not pending and self.budget(batch) >= self.rules.num_groups:
            self._begin(batch, self.rules.num_groups)

    def _pass_on(self, batch: int, groups: Iterable[int]) -> None:
        """Groups that a batch does not need go to the next one, unless they would be too old there."""
        ahead, last = self.rules.ahead, self.rules.num_steps_total
        moved = [group for group in groups if ahead and batch - self._begun_under.get(group, batch) <= ahead]
        if batch == last:
            moved = [group for group in moved if group not in self._begun_under]
        for group in moved:
            if batch < last:
                self._join(batch + 1, group, 1, self.groups.salt_of(group))
            else:
                self.groups.drop(group)
        if moved and batch == last:
            gone = set(moved)
            self._fresh = [request for request in self._fresh if request // self.rules.group_size not in gone]
        elif moved:
            self._sort()
            self._settle(batch + 1)

    def _advance(self) -> None:
        while self.frontier <= self.rules.num_steps_total and self.is_complete(self.frontier):
            self.frontier += 1

    def _begin_request(self, request: int, version: int) -> None:
        self._fresh.pop()
        self.open[request] = Request()
        self._note_version(request, version)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        verdicts = self.groups.verdicts
        groups = [
            [group, batch, self.groups.salt_of(group), verdicts.get(group), self._begun_under.get(group)]
            for group, batch in self.groups.moved
        ]
        return {
            "batch_rows": self.rules.batch_rows,
            "taken": self.taken,
            "opened": self.opened,
            "next_group": self.groups.next_group,
            "groups": groups,
            "fresh": list(self._fresh),
        }

    def load(self, state: Mapping[str, Any], still_open: Mapping[int, Request]) -> None:
        self._check(state)
        size = self.rules.group_size
        self.taken, self.opened = state["taken"], state["opened"]
        self.open, self._fresh = dict(still_open), list(state["fresh"])
        unfinished = Counter(request // size for request in (*self._fresh, *self.open))
        for group, batch, salt, verdict, begun_under in state["groups"]:
            if batch <= self.taken:
                continue
            self._join(batch, group, 1, salt)
            self._left[group] = unfinished[group]
            if verdict is not None:
                self.groups.verdicts[group] = verdict
            elif not unfinished[group]:
                self.unjudged.add(group)
            if begun_under is not None:
                self._begun_under[group] = begun_under
        self.groups.next_group = state["next_group"]
        self.frontier = self.taken + 1
        self._advance()
