"""What samplers ask of a schedule: facts go in, orders come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megatron_rl.sampling.group_map import GroupMap
from megatron_rl.sampling.schedule_types import Counts, GroupSwap, Numbers, RequestDecision, SliceOrder
from megatron_rl.sampling.verdicts import GroupVerdicts


class RequestScheduler(Protocol):
    """Interface of a `Scheduler`, a `Recorder` around one, and a `Replay`.

    admits: whether waiting requests may start; False drains the engines.
    """

    admits: bool

    counts: dict[str, int]
    """For metrics: renewed, moved, truncated, resampled, forgotten_tokens since the run began."""

    groups: GroupMap
    """Which batch each group belongs to now."""

    verdicts: GroupVerdicts
    """Takes verdicts on groups, with `ScheduleConfig.kept_groups`."""

    def next_order(self, replica: int) -> SliceOrder | None:
        """The replica's next slice, which is outstanding from now on. None: there is none until another fact
        arrives, or the replica is dead, or its last order is outstanding.
        """

    def slice_done(self, replica: int, num_steps: int, tokens: Counts, finished: Numbers, away: Numbers = ()) -> None:
        """The outstanding order was carried out. tokens: request -> number of new tokens. away: requests whose turn has
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
