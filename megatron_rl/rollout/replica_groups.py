"""The TP groups of a replica with attention data parallelism (attention DP): who has which request, and their steps.

Each group has an engine with attention, a KV cache and requests of its own. Experts are shared, so that an engine step
of one group is a step of all: a group without work runs an empty batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_rl.rollout.slices import Drawn, Start

Value = TypeVar("Value")


def share_out(starts: Iterable[Start], unfinished: Mapping[int, int], num_groups: int) -> dict[int, int]:
    """Request -> the TP group that gets it: that with the fewest unfinished requests.

    Requests of one prompt go together, because they share its keys and values. unfinished: request -> its group, of
    earlier starts.
    """
    prompts: dict[object, list[int]] = {}
    for start in starts:
        prompts.setdefault(start.prompt_key, []).append(start.request)
    counts, places = Counter(unfinished.values()), dict[int, int]()
    for requests in prompts.values():
        group = min(range(num_groups), key=lambda number: counts[number])
        counts[group] += len(requests)
        places |= dict.fromkeys(requests, group)
    return places


class ReplicaGroups:
    """This rank's TP group among those of its replica. All ranks of the replica must make the same calls.

    dp_group: ranks with this tp_rank, one of each TP group, over gloo. Alone, nothing is sent.
    """

    def __init__(self, dp_group: dist.ProcessGroup) -> None:
        self._dp_group = dp_group
        self.dp_rank, self.dp_size = dist.get_rank(dp_group), dist.get_world_size(dp_group)

    def any(self, mine: bool) -> bool:
        """Whether it is true of any group."""
        return bool(self.largest(float(mine)))

    def largest(self, mine: float) -> float:
        """The largest of the groups' numbers."""
        if self.dp_size == 1:
            return mine
        number = torch.tensor([mine], dtype=torch.float64)
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self._dp_group)
        return float(number)

    def all(self, mine: Value) -> list[Value]:
        """The value of each group, in the order of groups."""
        parts = [mine] * self.dp_size
        if self.dp_size > 1:
            dist.all_gather_object(parts, mine, group=self._dp_group)
        return parts

    def collect(self, mine: dict[int, Drawn]) -> dict[int, Drawn]:
        """On ranks of the first group the new tokens of all groups' requests, on others those of its own."""
        if self.dp_size == 1:
            return mine
        parts: list[dict[int, Drawn]] | None = [{}] * self.dp_size if self.dp_rank == 0 else None
        dist.gather_object(mine, parts, group=self._dp_group, group_dst=0)
        return mine if parts is None else {request: new for part in parts for request, new in part.items()}
