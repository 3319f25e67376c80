"""What running ahead was worth in a step: who waited for whom, and how old the tokens were."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from megatron_rl.observe.phase_clock import DRIVER
from megatron_rl.sampling.backlog import Backlog
from megatron_rl.sampling.replica_states import ReplicaSlots

Note = Callable[[str, str, float, float, float], None]
"""(lane, phase, start, stop, seconds that count): of the run's clock."""


class SliceMetrics:
    """Counts from one `take` to the next. note: keeps an interval for the timeline."""

    def __init__(self, slots: ReplicaSlots, note: Note, counts: Mapping[str, int]) -> None:
        """counts: `Decides.counts` where the run begins or goes on."""
        self._lanes, self._note = slots, note
        self._since = time.time()
        self._waited_s = 0.0
        self._counts = dict(counts)

    def waited(self, start: float, stop: float) -> None:
        """The trainer has waited for answers."""
        self._waited_s += stop - start
        self._note(DRIVER, "gen", start, stop, stop - start)

    def take(self, work: Backlog) -> dict[str, float]:
        """The metrics of a step."""
        now = time.time()
        elapsed, ran = max(now - self._since, 1e-9), work.ran
        work.ran = []
        busy = sum(one.stop - max(one.start, self._since) for one in ran)
        for one in ran:
            self._note(self._lanes.all[one.replica].replica.name, "slice", one.start, one.stop, 0.0)
        counts = dict(work.decider.counts)
        new = {f"rollout/{name}": float(count - self._counts.get(name, 0)) for name, count in counts.items()}
        metrics = {
            "rollout/idle_share": max(0.0, 1 - busy / (elapsed * max(1, len(self._lanes.living)))),
            "rollout/pause_s": max((one.swap_seconds for one in ran), default=0.0),
            "rollout/replicas": float(len(self._lanes.living)),
            "rollout/replicas_lost": float(self._lanes.num_lost),
            "trainer/idle_share": min(1.0, self._waited_s / elapsed),
        }
        self._since, self._waited_s, self._counts = now, 0.0, counts
        return metrics | new
