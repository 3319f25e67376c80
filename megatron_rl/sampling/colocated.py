"""Generation in turns with training, on the actor's own ranks: rounds of slices until a batch is complete."""

from __future__ import annotations

from megatron_rl.roles.rollout import Rollout
from megatron_rl.rollout.slices import Slice
from megatron_rl.sampling.backlog import Backlog


class ColocatedSlices:
    """Drives all replicas of the actor's pool; they are in rollout mode only inside `until_complete`."""

    def __init__(self, rollout: Rollout, work: Backlog) -> None:
        self.rollout, self.work = rollout, work

    def until_complete(self, step: int) -> None:
        """Draw until the batch of `step` is complete, with the actor's present weights, those of step - 1.

        The ranks are in rollout mode. Requests of later batches that are unfinished then go on in the next turn.
        """
        work, version = self.work, step - 1
        work.decider.version_ready(version)
        while not work.decider.is_complete(step):
            orders = {replica: work.next_slice(replica) for replica in range(len(work.engines))}
            slices = {replica: one for replica, one in orders.items() if one is not None}
            if not slices:
                raise RuntimeError(f"batch {step} is not complete and no replica has anything to do")
            for report in self.rollout.advance(slices).get():
                if report.replica in slices:
                    work.done(report)
        self._leave_engines(version)

    def _leave_engines(self, version: int) -> None:
        """Take what is unfinished out of the engines, whose caches are given back."""
        drops = {
            replica: Slice(version, 0, drops=tuple(sorted(engine)))
            for replica, engine in enumerate(self.work.engines)
            if engine
        }
        if drops:
            self.rollout.advance(drops).get()
        for engine in self.work.engines:
            engine.clear()
