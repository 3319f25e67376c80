"""The state of all requests of a run: not handed out, waiting, open or finished; and which batches are complete."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.sampling.group_map import GroupMap, move_groups, plan_swap
from megatron_rl.sampling.schedule_types import GroupSwap, ScheduleConfig


@dataclass
class Request:
    """An open request. num_tokens: of its response so far. attempt: number of times that it was started again. version:
    that of its last token. late: number of slices in which the trainer waited for it alone.
    """

    num_tokens: int = 0
    attempt: int = 0
    version: int = 0
    late: int = 0


class Requests:
    """Hands out requests in the order of their numbers. A request is open from its first hand-out until it is finished.

    open: the open requests by number. A request of a dead replica is given back and is handed out again first.
    frontier: the first batch that is not complete. taken: the last batch that the trainer took. groups: the batch of
    every group.
    """

    def __init__(self, rules: ScheduleConfig) -> None:
        """No request is handed out; batches before `first_step` are taken."""
        self.rules = rules
        self.groups = GroupMap(rules.num_groups, rules.group_size)
        self.open: dict[int, Request] = {}
        self.taken = rules.first_step - 1
        self.frontier = rules.first_step
        self._next_new = self.taken * rules.batch_rows
        self._given_back: list[int] = []
        self._num_finished: Counter[int] = Counter()
        self._begun_under: dict[int, int] = {}

    def head(self) -> int | None:
        """The request that is handed out next; None at the end of the run."""
        if self._continues:
            return self._given_back[0]
        return self._next_new if self._next_new < self.rules.num_steps_total * self.rules.batch_rows else None

    @property
    def _continues(self) -> bool:
        """Whether the next request is one that was given back."""
        return bool(self._given_back)

    def next_batch(self) -> int | None:
        """The batch of the request that is handed out next."""
        head = self.head()
        return None if head is None else self.groups.batch_of(head)

    def may_start(self, request: int, version: int) -> bool:
        """Whether a waiting request may be handed out under `version`."""
        if request < self._next_new:  # it has begun before, and may be late as if under that version
            begun = self._begun_under.get(request // self.rules.group_size, version)
            return begun <= version and self.groups.batch_of(request) <= self.rules.last_batch(version)
        return request < self.rules.end_of_starts(version)

    def num_waiting(self, version: int) -> int:
        """Requests that may be handed out under `version`."""
        new = max(0, self.rules.end_of_starts(version) - self._next_new)
        return sum(self.may_start(request, version) for request in self._given_back) + new

    def hand_out(self, num: int, version: int) -> list[int]:
        """The next `num` requests, or fewer if fewer may start under `version`."""
        handed_out: list[int] = []
        while len(handed_out) < num and (head := self.head()) is not None and self.may_start(head, version):
            if self._continues:
                self._given_back.pop(0)
                if head // self.rules.group_size in self._begun_under:
                    self._note_version(head, version)  # a replica may have older weights than the one that was lost
            else:
                self._begin_request(head, version)
            handed_out.append(head)
        return handed_out

    def _begin_request(self, request: int, version: int) -> None:
        self.open[request] = Request()
        self._next_new += 1
        if self.rules.extra_groups:
            self._note_version(request, version)

    def _note_version(self, request: int, version: int) -> None:
        """Keep the oldest version under which a request of the group begins."""
        group = request // self.rules.group_size
        self._begun_under[group] = min(version, self._begun_under.get(group, version))

    def give_back(self, request: int) -> None:
        """An open request waits again."""
        insort(self._given_back, request, key=self._place)

    def _place(self, request: int) -> tuple[int, int]:
        """Return the sort key of a request that was given back."""
        return 0, request

    def finish(self, request: int) -> None:
        """An open request has its reply."""
        del self.open[request]
        self._num_finished[self.groups.batch_of(request)] += 1
        self._advance()

    def num_missing(self, batch: int) -> int:
        """Number of unfinished requests of a batch that is not taken yet."""
        return self.rules.batch_rows - self._num_finished[batch]

    def is_complete(self, batch: int) -> bool:
        """Whether all its requests are finished."""
        if batch < self.frontier or self.num_missing(batch) == 0:
            return True
        return batch == self.taken + 1 and self.planned_swap(batch) is not None

    def planned_swap(self, batch: int) -> GroupSwap | None:
        """The swap that completes a batch; None if none can."""
        rules = self.rules
        if not rules.extra_groups:
            return None
        begun = self._next_new, self._begun_under
        return plan_swap(self.groups, batch, self.open, *begun, rules.ahead, rules.extra_groups)

    def swap_groups(self, swap: GroupSwap) -> None:
        """Late groups go to the next batch, and finished ones of it join this one."""
        finished = [request for request in (*swap.late, *swap.ready) if request not in self.open]
        self._num_finished.subtract(map(self.groups.batch_of, finished))
        move_groups(self.groups, swap)
        self._num_finished.update(map(self.groups.batch_of, finished))
        self._advance()

    def take(self, batch: int) -> None:
        """The trainer took a complete batch."""
        self.taken = batch
        del self._num_finished[batch]
        size, batch_of = self.rules.group_size, self.groups.batch_of
        self._begun_under = {group: v for group, v in self._begun_under.items() if batch_of(group * size) > batch}
        self.groups.forget(batch)

    def state_dict(self) -> dict[str, Any]:
        """State as JSON values, without the open requests."""
        state: dict[str, Any] = {"batch_rows": self.rules.batch_rows, "taken": self.taken, "next_new": self._next_new}
        state["group_size"] = self.rules.group_size
        if self.rules.extra_groups:
            state["begun_under"] = sorted(self._begun_under.items())
        if moved := self.groups.moved:
            state["moved"] = moved
        return state

    def load(self, state: Mapping[str, Any], still_open: Mapping[int, Request]) -> None:
        """Continue from `state_dict` with these open requests. Raises ValueError if the rules do not fit."""
        self._check(state)
        rules = self.rules
        self.taken, self._next_new = state["taken"], state["next_new"]
        self.open = dict(still_open)
        self._begun_under = dict(state.get("begun_under", ()))
        self.groups.load(state.get("moved", ()))
        num_open = Counter(self.groups.batch_of(request) for request in still_open)
        for batch in range(self.taken + 1, rules.batch_of(self._next_new) + 1):
            num_started = sum(request < self._next_new for request in self.groups.requests_of(batch))
            self._num_finished[batch] = num_started - num_open[batch]
        self.frontier = self.taken + 1
        self._advance()

    def _check(self, state: Mapping[str, Any]) -> None:
        rules = self.rules
        if state["batch_rows"] != rules.batch_rows or state["taken"] < rules.first_step - 1:
            raise ValueError(
                f"a schedule of batch_rows={state['batch_rows']} after step {state['taken']} cannot continue with "
                f"batch_rows={rules.batch_rows} from step {rules.first_step}"
            )
        if (size := state.get("group_size", rules.group_size)) != rules.group_size:
            raise ValueError(f"a schedule of groups of {size} cannot continue with groups of {rules.group_size}")

    def _advance(self) -> None:
        """Move the frontier to the first batch that is not complete."""
        while self.num_missing(self.frontier) == 0:
            self.frontier += 1
