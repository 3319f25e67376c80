"""What the schedule of rollouts depends on, and the words in which it is told: rules, orders, decisions. Plain data.

Batch s is what training step s trains; its requests are numbered (s-1)*batch_rows + row. Version v is the weights after
step v. A token of batch s that is drawn under version w has staleness (s-1) - w, which is never above `ahead`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

POLICIES = ("wait", "truncate", "resample")

Kind = Literal["truncate", "resample", "forget"]


@dataclass(frozen=True)
class Rules:
    """What does not change during a run.

    batch_rows: requests of one batch. ahead: bound of staleness, in steps. sync_every: steps from one version that
    rollouts get to the next. num_steps_total: the last step; requests of later batches are never started.
    first_step: the first step of this process; version first_step - 1 is what replicas begin with.
    slice_steps: engine steps of a slice, at most. max_running: requests that one engine runs at once; max_queued: how
    many more it is given, so that a place that becomes free within a slice is taken at once.
    partial: unfinished requests go on under new weights; else a replica takes weights only when it has none.
    recompute_kv: with `partial`, requests are dropped and started anew under new weights. deterministic: orders depend
    on rules and answers' lengths alone. colocated: engines rest while training runs and hold nothing afterwards.
    straggler_slices: after so many slices in which nothing else of its batch was missing, the policy acts on the last
    request of the batch that is trained next. straggler_attempts: how often "resample" draws a request anew.
    """

    batch_rows: int
    num_steps_total: int
    ahead: int = 1
    sync_every: int = 1
    first_step: int = 1
    slice_steps: int = 64
    max_running: int = 256
    max_queued: int = 0
    partial: bool = True
    recompute_kv: bool = False
    deterministic: bool = False
    colocated: bool = False
    straggler_policy: str = "wait"
    straggler_slices: int = 4
    straggler_attempts: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError for values that cannot work, above all an `ahead` under which nothing would go on."""
        least = {"batch_rows": 1, "num_steps_total": 1, "ahead": 0, "sync_every": 1, "first_step": 1}
        least |= {"slice_steps": 1, "max_running": 1, "straggler_slices": 1, "straggler_attempts": 0, "max_queued": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {lowest}")
        if self.ahead < self.sync_every - 1:
            raise ValueError(
                f"ahead={self.ahead} is below sync_every - 1: with weights sent every {self.sync_every} steps, the "
                f"batches in between need ahead={self.sync_every - 1} at least"
            )
        if self.straggler_policy not in POLICIES:
            raise ValueError(f"straggler_policy={self.straggler_policy!r} must be one of {', '.join(POLICIES)}")
        if self.colocated and not (self.partial and self.deterministic and self.sync_every == 1):
            raise ValueError("colocated=True needs partial=True, deterministic=True and sync_every=1")

    @property
    def in_rounds(self) -> bool:
        """Whether replicas run in rounds: always without `ahead`, where a batch is one round."""
        return self.deterministic or self.ahead == 0

    @property
    def versions_late(self) -> int:
        """In rounds, version v is taken once batch v + this is complete: 1 where `ahead` allows it, so that replicas
        draw while step v is trained; else 0.
        """
        return 0 if self.colocated else min(1, self.ahead + 1 - self.sync_every)

    def batch_of(self, request: int) -> int:
        """The batch that a request belongs to."""
        return request // self.batch_rows + 1

    def requests_of(self, batch: int) -> range:
        """The numbers of a batch's requests."""
        return range((batch - 1) * self.batch_rows, batch * self.batch_rows)

    def last_batch(self, version: int) -> int:
        """The last batch of which requests may be started under `version`."""
        return min(version + 1 + self.ahead, self.num_steps_total)

    def needed_version(self, batch: int) -> int:
        """The lowest version, of those that rollouts get, under which `batch` may be started."""
        lowest = max(batch - 1 - self.ahead, 0)
        return -(-lowest // self.sync_every) * self.sync_every

    def sends(self, step: int) -> bool:
        """Whether weights are sent to the rollout after `step`."""
        return step % self.sync_every == 0 or step == self.num_steps_total


@dataclass(frozen=True)
class Order:
    """One slice: drop `drops`, hold the weights of `version`, begin `starts`, then `num_steps` engine steps at most.

    num_steps None: until nothing is left to generate. A request in both `drops` and `starts` is begun anew with the
    tokens that its owner has by then. Both are in the order of their numbers.
    """

    replica: int
    version: int
    num_steps: int | None
    starts: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What the owner of the tokens must do with a request now.

    truncate: its tokens so far are the answer, which ends by length. resample: forget its tokens; they are drawn anew
    as attempt number `attempt`, with other seeds. forget: forget its tokens; the same attempt is drawn once more.
    """

    kind: Kind
    request: int
    attempt: int


class Decides(Protocol):
    """What an executor needs of whatever decides: a `Scheduler`, a `Recorder` around one, or a `Replay`.

    admits: whether waiting requests may be begun; not, to drain the engines.
    """

    admits: bool

    counts: dict[str, int]
    """For metrics: renewed, moved, truncated, resampled, forgotten_tokens since the run began."""

    @property
    def is_drawn(self) -> bool:
        """Whether every request of the run is finished."""

    def next_order(self, replica: int) -> Order | None:
        """The replica's next slice, which is outstanding from now on. None: nothing for it until another fact comes."""

    def slice_done(self, replica: int, num_steps: int, drawn: Mapping[int, int], finished: Collection[int]) -> None:
        """The outstanding order was carried out. drawn: request -> number of new tokens."""

    def sending(self, version: int) -> None:
        """`version` begins to overwrite what replicas have received and do not hold yet. Ask `may_send` before."""

    def version_ready(self, version: int) -> None:
        """All living replicas have received the weights of `version` beside those that they hold."""

    def step_taken(self, step: int) -> None:
        """The trainer took batch `step`, which is complete."""

    def saved(self, step: int, interrupted: bool = False) -> None:
        """A checkpoint after `step` was written; or, interrupted, the engines did something else and are empty."""

    def replica_lost(self, replica: int) -> None:
        """The replica died."""

    def replica_back(self, replica: int, version: int) -> None:
        """The replica lives again; its engine is empty and holds `version`."""

    def is_complete(self, step: int) -> bool:
        """Whether all requests of batch `step` are finished."""

    def take_decisions(self) -> Sequence[Decision]:
        """Decisions since the last call, to be acted on before the next order is given. Call after every fact."""

    def wanted_version(self, replica: int) -> int | None:
        """The lowest version that an idle replica must receive before it can get an order; None: it needs none."""

    def may_send(self, version: int) -> bool:
        """Whether weights may be sent now: no replica still has to take an earlier version out of the same buffer."""

    def may_save(self, step: int) -> bool:
        """Whether a run that resumes from a checkpoint written now would go on as this one does."""

    def state_dict(self) -> dict[str, Any]:
        """All that future decisions depend on, ready for JSON; outstanding orders count as never given."""
