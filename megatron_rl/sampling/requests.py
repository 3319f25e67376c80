"""All requests of a run: never handed out, waiting, open or finished; and which batches are complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from megatron_rl.sampling.rules import Rules


@dataclass
class Request:
    """An open request. drawn: its tokens. version: under which the last of them was drawn. late: slices it was late."""

    drawn: int = 0
    attempt: int = 0
    version: int = 0
    late: int = 0


class Requests:
    """A request is open from its first hand-out until it is finished; `open` has those, by number.

    They are handed out in the order of their numbers. What a dead replica had is given back, and so comes first again.
    frontier: the first batch that is not complete. taken: the last batch that the trainer took.
    """

    def __init__(self, rules: Rules) -> None:
        """Nothing handed out yet; batches before `first_step` are taken."""
        self.rules = rules
        self.open: dict[int, Request] = {}
        self.taken = rules.first_step - 1
        self.frontier = rules.first_step
        self._next_new = self.taken * rules.batch_rows
        self._given_back: list[int] = []
        self._num_finished: Counter[int] = Counter()

    def head(self) -> int | None:
        """The request that is handed out next."""
        if self._given_back:
            return self._given_back[0]
        return self._next_new if self._next_new < self.rules.num_steps_total * self.rules.batch_rows else None

    def num_waiting(self, version: int) -> int:
        """Requests that may be handed out under `version`."""
        end = self.rules.last_batch(version) * self.rules.batch_rows
        return sum(request < end for request in self._given_back) + max(0, end - self._next_new)

    def hand_out(self, num: int, version: int) -> list[int]:
        """The next `num` requests, or as many as may be started under `version`."""
        found: list[int] = []
        end = self.rules.last_batch(version) * self.rules.batch_rows
        while len(found) < num and (head := self.head()) is not None and head < end:
            if self._given_back:
                heappop(self._given_back)
            else:
                self.open[head] = Request()
                self._next_new += 1
            found.append(head)
        return found

    def give_back(self, request: int) -> None:
        """An open request waits again."""
        heappush(self._given_back, request)

    def finish(self, request: int) -> None:
        """An open request has its answer."""
        del self.open[request]
        self._num_finished[self.rules.batch_of(request)] += 1
        self._advance()

    def num_missing(self, batch: int) -> int:
        """Requests of a batch, not taken yet, that are not finished."""
        return self.rules.batch_rows - self._num_finished[batch]

    def is_complete(self, batch: int) -> bool:
        """Whether all its requests are finished."""
        return batch < self.frontier or self.num_missing(batch) == 0

    def take(self, batch: int) -> None:
        """The trainer took a complete batch."""
        self.taken = batch
        del self._num_finished[batch]

    def state_dict(self) -> dict[str, Any]:
        """Ready for JSON, without what is open."""
        return {"batch_rows": self.rules.batch_rows, "taken": self.taken, "next_new": self._next_new}

    def load(self, state: Mapping[str, Any], still_open: Mapping[int, Request]) -> None:
        """Go on from `state_dict`, with these open requests. Raises ValueError where the rules do not fit."""
        rules = self.rules
        if state["batch_rows"] != rules.batch_rows or state["taken"] < rules.first_step - 1:
            raise ValueError(
                f"a schedule of batch_rows={state['batch_rows']} after step {state['taken']} cannot go on with "
                f"batch_rows={rules.batch_rows} from step {rules.first_step}"
            )
        self.taken, self._next_new = state["taken"], state["next_new"]
        self.open = dict(still_open)
        num_open = Counter(rules.batch_of(request) for request in still_open)
        for batch in range(self.taken + 1, rules.batch_of(self._next_new) + 1):
            num_started = min(rules.batch_rows, self._next_new - rules.requests_of(batch).start)
            self._num_finished[batch] = num_started - num_open[batch]
        self.frontier = self.taken + 1
        self._advance()

    def _advance(self) -> None:
        """To the first batch that is not complete."""
        while self.num_missing(self.frontier) == 0:
            self.frontier += 1
