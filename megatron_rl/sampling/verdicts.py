"""Verdicts on groups as the schedule takes them, and the groups that begin because of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from megatron_rl.sampling.filtered_requests import FilteredRequests
from megatron_rl.sampling.schedule_types import GroupsJoined, Verdict


class GroupVerdicts(Protocol):
    """The part of a schedule that takes verdicts."""

    @property
    def unjudged(self) -> Collection[int]:
        """Groups whose responses are finished, and that have no verdict."""

    def open_groups(self) -> None:
        """Number the groups of batches that may start now. Call it before the next order."""

    def take_joined(self) -> Sequence[GroupsJoined]:
        """Return all changes of groups since the last call."""

    def judged(self, group: int, verdict: Verdict) -> None:
        """A group of `unjudged` has a verdict. Groups may join a batch because of it, or leave it."""


class NoVerdicts:
    """A schedule whose batches train all of their groups."""

    unjudged: Collection[int] = ()

    def open_groups(self) -> None:
        """Nothing to do: which groups a batch begins with follows from its number."""

    def take_joined(self) -> Sequence[GroupsJoined]:
        """Return nothing."""
        return ()

    def judged(self, group: int, verdict: Verdict) -> None:
        """Raises ValueError."""
        raise ValueError(f"group {group} is {verdict}, and this schedule takes no verdicts")


class Verdicts:
    """Lets verdicts take effect on requests, and counts them.

    last_batch: returns the last batch that may start now; None: not now. may_apply: whether verdicts may take effect.
    """

    def __init__(
        self,
        requests: FilteredRequests,
        counts: dict[str, int],
        last_batch: Callable[[], int | None],
        may_apply: Callable[[], bool],
    ) -> None:
        self._requests, self._counts = requests, counts
        self._last_batch, self._may_apply = last_batch, may_apply

    @property
    def unjudged(self) -> Collection[int]:
        """Groups whose responses are finished, and that have no verdict."""
        return self._requests.unjudged

    def open_groups(self) -> None:
        """As `GroupVerdicts.open_groups`."""
        last = self._last_batch()
        if last is not None:
            self._requests.open_batches(last)

    def take_joined(self) -> Sequence[GroupsJoined]:
        """As `GroupVerdicts.take_joined`."""
        joined, self._requests.joined = self._requests.joined, []
        return joined

    def judged(self, group: int, verdict: Verdict) -> None:
        """Raises ValueError for a group that is not to be judged."""
        if group not in self._requests.unjudged:
            raise ValueError(f"group {group} is not to be judged: these are {sorted(self._requests.unjudged)}")
        self._requests.judge(group, verdict)
        self.apply()

    def apply(self) -> None:
        """Let the verdicts take effect that may."""
        if not self._may_apply():
            return
        for verdict in self._requests.apply_verdicts().values():
            name = f"groups_{verdict}"
            self._counts[name] = self._counts.get(name, 0) + 1
