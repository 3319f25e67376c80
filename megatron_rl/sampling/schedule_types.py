"""Rules, orders and decisions of the schedule of rollouts, as plain data.

Training step s trains batch s. It begins with the requests (s-1)*batch_rows + row; `GroupMap` has those that belong to
it later. Version v is the weights after step v. A token of batch s that version w generates has staleness (s-1) - w,
which is never above `ahead`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

POLICIES = ("wait", "truncate", "resample")

Kind = Literal["truncate", "resample", "forget"]

Verdict = Literal["kept", "uniform", "failed"]
"""On a group whose responses are scored: it is trained; its scores are equal; none of its responses has a score."""

SALT_STRIDE = 1_000_003
"""Difference of the salts of two batches of generation of one step; more than a run has steps."""

Counts = Mapping[int, int]
"""request -> number."""
Numbers = Collection[int]
"""Requests."""


@dataclass(frozen=True)
class KeptGroups:
    """How many kept groups complete a batch, and how many groups begin for one at most; 0: no limit."""

    wanted: int
    most: int = 0


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
    """Over-sampling (`group_map.py`): late groups that a batch may leave to the next one, in place of finished
    ones of that; and groups that may start in addition to `early_batches`. 0: none."""
    group_size: int = 1
    """Requests per group."""
    filtered: KeptGroups | None = None
    """Only groups with the verdict "kept" complete a batch (`filtered_requests.py`); None: all are trained."""

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
        if self.kept_groups > self.num_groups or 0 < self.max_groups < self.kept_groups:
            raise ValueError(f"{self.filtered} does not fit {self.num_groups} groups")
        if self.filtered and self.extra_groups:
            raise ValueError(f"{self.filtered} and extra_groups: late groups of a filtered batch are not swapped")
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
    def kept_groups(self) -> int:
        """Kept groups that complete a batch; 0: all groups are trained."""
        return 0 if self.filtered is None else self.filtered.wanted

    @property
    def max_groups(self) -> int:
        """Groups that begin for one batch, at most; 0: no limit."""
        return 0 if self.filtered is None else self.filtered.most

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


@dataclass(frozen=True)
class GroupsJoined:
    """These groups belong to a batch from now on: new ones begin for it, or it takes one over from another batch. It is
    also a line of the journal.
    """

    event: ClassVar[str] = "joined"
    batch: int
    first: int
    """The number of the first group."""
    num: int
    """Groups, with consecutive numbers."""
    salt: int
    """A part of their seeds."""


@dataclass(frozen=True)
class Judged:
    """A verdict on a group. It is also a line of the journal."""

    event: ClassVar[str] = "judged"
    group: int
    verdict: Verdict
