"""Which batch each group of requests belongs to, by look-up.

A group is the samples of one prompt. Groups are numbered in the order of their prompts, and request number is
group * group_size + sample, for as long as the request lives. Only the batch of a group may change.
"""

from __future__ import annotations

from collections.abc import Iterable


class GroupMap:
    """Group -> batch: that in whose order the group begins, until it is moved. Only moved groups are stored."""

    def __init__(self, num_groups: int, group_size: int = 1) -> None:
        """num_groups: with which a batch begins. group_size: requests of each."""
        self.num_groups, self.group_size = num_groups, group_size
        self._moved: dict[int, int] = {}

    def first_batch(self, group: int) -> int:
        """Return the batch in whose order a group begins."""
        return group // self.num_groups + 1

    def batch_of(self, request: int) -> int:
        """Return the batch that a request belongs to now."""
        group = request // self.group_size
        return self._moved.get(group, self.first_batch(group))

    def of(self, batch: int) -> list[int]:
        """Return the groups of a batch, in the order of their numbers."""
        own = range((batch - 1) * self.num_groups, batch * self.num_groups)
        joined = [group for group, at in self._moved.items() if at == batch]
        return sorted({*(group for group in own if group not in self._moved), *joined})

    def requests_of(self, batch: int) -> list[int]:
        """Return the requests of a batch, in the order of their numbers."""
        return requests_of_groups(self.of(batch), self.group_size)

    def move(self, group: int, batch: int) -> None:
        """From now on the group belongs to this batch."""
        self._moved[group] = batch

    def forget(self, batch: int) -> None:
        """Drop what is known of groups that began and were trained in batches before this one."""
        self._moved = {g: at for g, at in self._moved.items() if max(at, self.first_batch(g)) >= batch}

    def dropped(self, batch: int) -> list[int]:
        """Return the groups of a taken batch that it does not train: none."""
        return []

    @property
    def moved(self) -> list[tuple[int, int]]:
        """(group, batch) of every group that is not where it began, for a checkpoint."""
        return sorted(self._moved.items())

    def load(self, moved: Iterable[tuple[int, int]]) -> None:
        """Continue with what `moved` returned."""
        self._moved = dict(moved)


def requests_of_groups(groups: Iterable[int], size: int) -> list[int]:
    """Return the requests of groups of `size` samples, in the order of the groups."""
    return [group * size + sample for group in groups for sample in range(size)]
