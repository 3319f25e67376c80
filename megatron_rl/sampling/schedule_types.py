"""Rules, orders and decisions of the schedule of rollouts, as plain data.

Training step s trains batch s. It begins with the requests (s-1)*batch_rows + row; `GroupMap` has those that belong to
it later. Version v is the weights after step v. A token of batch s that version w generates has staleness (s-1) - w,
which is never above `ahead`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from megatron_rl.sampling.group_map import GroupMap

POLICIES = ("wait", "truncate", "resample")

Kind = Literal["truncate", "resample", "forget"]

Counts = Mapping[int, int]
"""request -> number."""
Numbers = Collection[int]
"""Requests."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Settings of a schedule, which do not change during a run."""

    batch_rows: int
    """Requests per batch."""
    num_steps_total: int
    """The last step; requests of later batches never start."""
    ahead: int = 1
    """Bound of staleness, in steps."""
    sync_every: int = 1
    """Steps between the versions of the weights that the rollout gets."""
    first_step: int = 1
    """The first step of this process; replicas start with version first_step - 1."""
    slice_steps: int | None = 64
    """Engine steps per slice, at most; None: a slice ends with its requests."""
    max_running: int = 256
    """Requests that one engine runs at the same time."""
    max_queued: int = 0
    """Requests that an engine gets beyond these, so that one can start as soon as another ends within a slice."""
    partial: bool = True
    """Unfinished requests continue under new weights; if not, a replica takes weights only when it has no requests."""
    recompute_kv: bool = False
    """With `partial`: drop requests under new weights, and start them again with the tokens that they have."""
    deterministic: bool = False
    """Orders depend on these settings and on response lengths alone."""
    colocated: bool = False
    """Engines are offloaded while training runs, and lose their requests."""
    straggler_policy: str = "wait"
    """What happens to the last missing request of the batch that is trained next: one of POLICIES."""
    straggler_slices: int = 4
    """The policy acts after that request has been the last one for this number of slices."""
    straggler_attempts: int = 1
    """Number of times that "resample" starts a request again."""
    has_turns: bool = False
    """A request may have several turns, and is away from the engine between two of them."""
    awaits_turns: bool = False
    """A round starts only when no request is away, so that orders do not depend on how long replies to turns take."""
    extra_groups: int = 0
    """Over-sampling (`straggler_swap.py`): late groups that a batch may leave to the next one, in place of finished
    ones of that; and groups that may start in addition to `early_batches`. 0: none."""
    group_size: int = 1
    """Requests per group."""

    def __post_init__(self) -> None:
        """Raises ValueError for values that cannot work, above all an `ahead` under which the run would block."""
        least = {"batch_rows": 1, "num_steps_total": 1, "ahead": 0, "sync_every": 1, "first_step": 1}
        least |= {"slice_steps": 1, "max_running": 1, "straggler_slices": 1, "straggler_attempts": 0, "max_queued": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"{name}={value} must be at least {lowest}")
        if self.ahead < self.sync_every - 1:
            raise ValueError(
                f"ahead={self.ahead} is below sync_every - 1: with weights sent every {self.sync_every} steps, the "
                f"batches in between need ahead={self.sync_every - 1} at least"
            )
        if self.straggler_policy not in POLICIES:
            raise ValueError(f"straggler_policy={self.straggler_policy!r} must be one of {', '.join(POLICIES)}")
        if self.extra_groups and self.ahead < (least_ahead := 1 if self.colocated else self.sync_every + 1):
            raise ValueError(f"extra_groups={self.extra_groups} needs ahead >= {least_ahead}, is {self.ahead}")
        if self.extra_groups and self.deterministic and not self.colocated:
            raise ValueError(f"extra_groups={self.extra_groups} needs colocated=True with deterministic=True")
        if self.batch_rows % self.group_size or self.extra_groups * self.group_size > self.batch_rows:
            raise ValueError(
                f"batch_rows={self.batch_rows} must be groups of {self.group_size}, at least {self.extra_groups}"
            )
        if self.colocated and not (self.partial and self.deterministic and self.sync_every == 1):
            raise ValueError("colocated=True needs partial=True, deterministic=True and sync_every=1")

    @property
    def in_rounds(self) -> bool:
        """Whether replicas run in rounds. Without `ahead` they always do, and a batch is one round."""
        return self.deterministic or self.ahead == 0

    @property
    def versions_late(self) -> int:
        """In rounds, replicas take version v once batch v + versions_late is complete: 1 if `ahead` allows it, so that
        replicas generate while step v is trained; else 0.
        """
        return 0 if self.colocated else min(1, self.ahead + 1 - self.sync_every)

    @property
    def early_batches(self) -> int:
        """Batches beyond the next one that may start: with `extra_groups` one fewer than `ahead`, so that a group may
        be late; none where nothing is generated during training.
        """
        if not self.extra_groups:
            return self.ahead
        return 0 if self.colocated else self.ahead - 1

    @property
    def num_groups(self) -> int:
        """The groups with which a batch begins."""
        return self.batch_rows // self.group_size

    def batch_of(self, request: int) -> int:
        """The batch in whose order a request begins."""
        return request // self.batch_rows + 1

    def requests_of(self, batch: int) -> range:
        """The requests with which a batch begins."""
        return range((batch - 1) * self.batch_rows, batch * self.batch_rows)

    def last_batch(self, version: int) -> int:
        """The last batch whose requests may start under `version`."""
        return min(version + 1 + self.ahead, self.num_steps_total)

    def end_of_starts(self, version: int) -> int:
        """The first request that may not begin under `version`."""
        end = (version + 1 + self.early_batches) * self.batch_rows + self.extra_groups * self.group_size
        return min(end, self.num_steps_total * self.batch_rows)

    def needed_version(self, batch: int) -> int:
        """The lowest version that rollouts get under which `batch` may start."""
        lowest = max(batch - 1 - self.early_batches, 0)
        return -(-lowest // self.sync_every) * self.sync_every

    def sends(self, step: int) -> bool:
        """Whether weights are sent to the rollout after `step`."""
        return step % self.sync_every == 0 or step == self.num_steps_total


@dataclass(frozen=True)
class SliceOrder:
    """One slice: drop `drops`, take the weights of `version`, begin `starts`, then run at most `num_steps` engine
    steps.

    num_steps None: run until nothing is left to generate. A request in both `drops` and `starts` starts again with the
    tokens that it has so far. Both are in ascending order.
    """

    replica: int
    version: int
    num_steps: int | None
    starts: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()


@dataclass(frozen=True)
class RequestDecision:
    """What to do with the response of a request. It is also a line of the journal.

    truncate: its tokens so far are the response, which ends by length. resample: forget its tokens; attempt number
    `attempt` generates new ones with other seeds. forget: forget its tokens; the same attempt generates them again.
    """

    event: ClassVar[str] = "decided"
    kind: Kind
    request: int
    attempt: int


@dataclass(frozen=True)
class GroupSwap:
    """The requests of late groups, which leave their batch for the next one, and of as many finished groups, which join
    it from there. It is also a line of the journal.
    """

    event: ClassVar[str] = "swapped"
    late: tuple[int, ...]
    ready: tuple[int, ...]


class RequestScheduler(Protocol):
    """Interface of a `Scheduler`, a `Recorder` around one, and a `Replay`.

    admits: whether waiting requests may start; False drains the engines.
    """

    admits: bool

    counts: dict[str, int]
    """For metrics: renewed, moved, truncated, resampled, forgotten_tokens since the run began."""

    groups: GroupMap
    """Which batch each group belongs to now."""

    def next_order(self, replica: int) -> SliceOrder | None:
        """The replica's next slice, which is outstanding from now on. None: there is none until another fact
        arrives.
        """

    def slice_done(self, replica: int, num_steps: int, drawn: Counts, finished: Numbers, away: Numbers = ()) -> None:
        """The outstanding order was carried out. drawn: request -> number of new tokens. away: requests whose turn has
        ended, and which wait for the reply outside the engine.
        """

    def returned(self, request: int, is_finished: bool) -> None:
        """A request that was away has the reply to its turn. is_finished: it needs no further turn."""

    def sending(self, version: int) -> None:
        """`version` begins to overwrite weights that replicas have received but not taken. Ask `may_send` before."""

    def version_ready(self, version: int) -> None:
        """All living replicas have received the weights of `version`; they take them with a later order."""

    def step_taken(self, step: int) -> GroupSwap | None:
        """The trainer takes batch `step`, which is complete. Returns the swap that made it so, if late groups left it
        (`ScheduleConfig.extra_groups`): the engines of a colocated rollout are empty then.
        """

    def saved(self, step: int, interrupted: bool = False) -> None:
        """A checkpoint after `step` was written. interrupted: instead, the engines did something else and are empty."""

    def replica_lost(self, replica: int) -> None:
        """The replica died."""

    def replica_back(self, replica: int, version: int) -> None:
        """The replica has restarted; its engine is empty and has `version`."""

    def is_complete(self, step: int) -> bool:
        """Whether all requests of batch `step` are finished."""

    def take_decisions(self) -> Sequence[RequestDecision]:
        """Decisions since the last call. Call after every fact, and apply them before the next order."""

    def wanted_version(self, replica: int) -> int | None:
        """The lowest version that an idle replica must receive before it can get an order; None if it needs none."""

    def may_send(self, version: int) -> bool:
        """Whether weights may be sent now: no replica still has to take an earlier version from the same buffer."""

    def may_save(self, step: int) -> bool:
        """Whether a run that resumes from a checkpoint written now would continue as this one does."""

    def state_dict(self) -> dict[str, Any]:
        """All that future decisions depend on, as JSON values; outstanding orders count as never given."""
