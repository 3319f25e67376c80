"""Over-sampling: late groups of a batch change places with finished ones of the next batch.

A batch has all its groups then, and none waits for the longest response. A late group keeps its tokens and continues in
the next step, so no response is dropped for its length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megatron_rl.sampling.schedule_types import GroupSwap, ScheduleConfig


def plan_swap(
    rules: ScheduleConfig, step: int, still_open: Collection[int], num_begun: int, begun_under: Mapping[int, int]
) -> GroupSwap | None:
    """The swap that completes batch `step`; None if there is none yet.

    still_open: requests that are begun and not finished; all below `num_begun` are begun. begun_under: group ->
    the version under which its first request began. A group may become late only while its tokens, trained one step
    later, are not older than `ahead`; the batch waits for the others.
    """
    size, next_batch = rules.group_size, rules.requests_of(step + 1)
    late = sorted({request // size for request in still_open if request < next_batch.start})
    if num_begun < next_batch.start or any(step - begun_under[group] > rules.ahead for group in late):
        return None
    end = min(next_batch.stop, num_begun) // size
    held_up = {request // size for request in still_open}
    ready = [group for group in range(next_batch.start // size, end) if group not in held_up][: len(late)]
    if len(ready) < len(late):
        return None
    return GroupSwap(requests_of_groups(late, size), requests_of_groups(ready, size))


def requests_of_groups(groups: Collection[int], size: int) -> tuple[int, ...]:
    """The requests of groups of `size` samples, in the order of the groups."""
    return tuple(group * size + sample for group in groups for sample in range(size))
