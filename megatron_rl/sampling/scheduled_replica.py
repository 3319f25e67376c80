"""The schedule's knowledge of one replica."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.sampling.schedule_types import SliceOrder


@dataclass(eq=False)
class ScheduledReplica:
    """One replica.

    held: the version of its weights. ready: the newest version that it has received, and takes with its next order.
    owned: its open requests. present: those of them that are not away. inside: the requests in its engine. renewed:
    owned requests that the engine must start again, with the tokens that they have. order: the outstanding one.
    straggler: the request of that order for which alone the trainer waits.
    """

    held: int
    ready: int
    is_alive: bool = True
    owned: set[int] = field(default_factory=set)
    present: set[int] = field(default_factory=set)
    inside: set[int] = field(default_factory=set)
    renewed: set[int] = field(default_factory=set)
    order: SliceOrder | None = None
    straggler: int | None = None
