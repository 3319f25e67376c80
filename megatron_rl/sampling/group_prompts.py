"""The prompts of groups by number, read from the run's cursor in batches of generation (dynamic sampling)."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.data.prompt_mixture import MixtureCursor, PromptCursor
from megatron_rl.data.prompt_sampler import PromptSampler
from megatron_rl.records import Prompts


class GroupPrompts:
    """Group number g has the g-th prompt of the run. The run's cursor stays at the batch of generation with the first
    group that is not trained, so that a checkpoint has all that begins or continues later.
    """

    def __init__(
        self,
        cursor: MixtureCursor | PromptSampler,
        read: Callable[[PromptCursor], Prompts],
        num_groups: int,
        first_group: int,
    ) -> None:
        """read: the next batch of generation of a cursor, `num_groups` groups. first_group: where `cursor` stands."""
        self._cursor, self._ahead, self._read = cursor, cursor.ahead(), read
        self._num_groups, self._first, self._next = num_groups, first_group, first_group
        self._batches: dict[int, Prompts] = {}
        self._first_after: dict[int, int] = {}

    def of(self, group: int) -> tuple[Prompts, range]:
        """Return the prompts of a group's batch of generation, and the group's rows there."""
        while self._next <= group:
            self._batches[self._next] = self._read(self._ahead)
            self._next += self._num_groups
        first = group // self._num_groups * self._num_groups
        prompts = self._batches[first]
        size = len(prompts) // self._num_groups
        return prompts, range((group - first) * size, (group - first + 1) * size)

    def trained(self, step: int, first_live: int) -> None:
        """Move the run's cursor. first_live: the first group that a later step may train."""
        while self._first + self._num_groups <= first_live:
            self._cursor.next_indices()
            self._batches.pop(self._first, None)
            self._first += self._num_groups
        self._first_after = {old: at for old, at in self._first_after.items() if old >= step - 1} | {step: self._first}

    def first_after(self, step: int) -> int:
        """Return the group at which the run's cursor stood after a step: the last one, or the one before."""
        return self._first_after.get(step, self._first)
