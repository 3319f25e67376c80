"""Whether running ahead pays, as the last steps show it; said once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

WINDOW = 10
"""Steps that are looked at."""
TRAINER_LIMIT, ROLLOUT_LIMIT = 0.3, 0.5
"""Shares of the time that one side may wait before that is said."""


def what_to_change(trainer_idle: Sequence[float], rollout_idle: Sequence[float], ahead: int) -> str | None:
    """Which side waits, and what to change; None where running ahead pays.

    trainer_idle, rollout_idle: shares of the time of each step. ahead: trainer.rollout_ahead.
    """
    trainer, rollout = (sum(shares) / len(shares) for shares in (trainer_idle, rollout_idle))
    if trainer <= TRAINER_LIMIT and rollout <= ROLLOUT_LIMIT:
        return None
    said = (
        f"in the last {len(trainer_idle)} steps training waited for answers {trainer:.0%} of the time, and rollout "
        f"replicas idled {rollout:.0%}: "
    )
    if trainer > TRAINER_LIMIT and rollout > TRAINER_LIMIT:
        return (
            f"{said}both wait for the longest answers; raise trainer.rollout_ahead={ahead}, or use fewer ranks of each"
        )
    if trainer > TRAINER_LIMIT:
        return (
            f"{said}give the rollout more of the ranks, or let it draw more at once (rollout.max_num_seqs); where it "
            f"waited for single long answers, raise trainer.rollout_ahead={ahead}"
        )
    return f"{said}give training more of the ranks, and the rollout fewer"


class SpeedWarning:
    """Looks at every step, the first one aside, in which nothing had been drawn ahead. ahead: trainer.rollout_ahead."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._trainer: deque[float] = deque(maxlen=WINDOW)
        self._rollout: deque[float] = deque(maxlen=WINDOW)
        self._num_steps = 0
        self._is_said = False

    def note(self, trainer_idle: float, rollout_idle: float) -> str | None:
        """One more step's shares; what is to be said about the last ones, at most once in a run."""
        self._num_steps += 1
        if self._num_steps > 1:
            self._trainer.append(trainer_idle)
            self._rollout.append(rollout_idle)
        if self._is_said or len(self._trainer) < WINDOW:
            return None
        said = what_to_change(self._trainer, self._rollout, self._ahead)
        self._is_said = said is not None
        return said
