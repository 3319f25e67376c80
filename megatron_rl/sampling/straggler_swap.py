"""Over-sampling: late groups of a batch are trained in the next one, and finished groups of that in this one.

A batch has all its groups then, and none waits for the longest response. A late group keeps its tokens and continues in
the next step, so no response is dropped for its length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megatron_rl.sampling.group_map import GroupMap, requests_of_groups
from megatron_rl.sampling.schedule_types import GroupSwap


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
