"""What a nightly run comes to: one outcome, one exit code. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from megatron_rl.errors import ConfigError, StoppedAfterStep, StoppedBeforeStep
from megatron_rl.trials.golden import Check

PREEMPTED = (StoppedAfterStep.exit_code, StoppedBeforeStep.exit_code)


class Outcome(Enum):
    """Name, and the exit code of `megatron-rl nightly`."""

    PASS = 0
    INVALID_CONFIG = ConfigError.exit_code
    REGRESSION = 10
    CRASH = 11
    HANG = 12


@dataclass(frozen=True)
class Life:
    """One process's end. exit_code: negative for a signal. to_stop: it was sent SIGTERM, so ending so is right.

    hung_after_s: seconds without progress after which it was killed; None: it ended by itself.
    """

    exit_code: int
    seconds: float
    last_step: int
    to_stop: bool = False
    hung_after_s: float | None = None

    @property
    def ended_well(self) -> bool:
        """Finished, or saved and stopped as it was told."""
        return self.hung_after_s is None and (
            self.exit_code == 0 or (self.to_stop and self.exit_code in PREEMPTED)
        )  # a last step may end before the signal is seen

    @property
    def finished(self) -> bool:
        """Nothing is left to do."""
        return self.hung_after_s is None and self.exit_code == 0


def outcome_of(lives: Sequence[Life], checks: Sequence[Check]) -> Outcome:
    """Hang before crash before regression: what ended badly has no metrics to compare."""
    if any(life.hung_after_s is not None for life in lives):
        return Outcome.HANG
    if any(life.exit_code == ConfigError.exit_code for life in lives):
        return Outcome.INVALID_CONFIG
    if not lives or not all(life.ended_well for life in lives) or not lives[-1].finished:
        return Outcome.CRASH
    return Outcome.PASS if all(check.passed for check in checks) else Outcome.REGRESSION
