"""Which batch each group of requests belongs to, by look-up, and how over-sampling swaps groups of two batches.

A group is the samples of one prompt. Groups are numbered in the order of their prompts, and request number is
group * group_size + sample, for as long as the request lives. Only the batch of a group may change.

Over-sampling: late groups of a batch are trained in the next one, and finished groups of that in this one. A batch has
all its groups then, and none waits for the longest response. A late group keeps its tokens and continues in the next
step, so no response is dropped for its length.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from megatron_rl.sampling.schedule_types import GroupSwap


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


def plan_swap(
    groups: GroupMap,
    step: int,
    still_open: Collection[int],
    num_begun: int,
    begun_under: Mapping[int, int],
    ahead: int,
    most: int,
) -> GroupSwap | None:
    """The swap that completes batch `step`; None if there is none yet.

    still_open: requests that are begun and not finished; all below `num_begun` are begun. begun_under: group ->
    the version under which its first request began. A group may become late only while its tokens, trained one step
    later, are not older than `ahead`, and at most `most` may; the batch waits for the others.
    """
    size, own = groups.group_size, groups.of(step)
    held_up = {request // size for request in still_open}
    late = [group for group in own if group in held_up]
    if num_begun < (own[-1] + 1) * size or any(step - begun_under.get(group, -ahead) > ahead for group in late):
        return None
    after = [group for group in groups.of(step + 1) if (group + 1) * size <= num_begun]
    ready = [group for group in after if group not in held_up][: len(late)]
    if len(ready) < len(late) or len(late) > most:
        return None
    return GroupSwap(*(tuple(requests_of_groups(chosen, size)) for chosen in (late, ready)))


def move_groups(groups: GroupMap, swap: GroupSwap) -> None:
    """Late groups go to the next batch, and finished ones of it join this one."""
    step = groups.batch_of(swap.late[0])
    for requests, batch in ((swap.late, step + 1), (swap.ready, step)):
        for group in {request // groups.group_size for request in requests}:
            groups.move(group, batch)
