"""The reward function called in this process: for a run that is all in one process, so that a debugger sees it."""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from megatron_rl.scoring.function import RewardSource, load_reward_function
from megatron_rl.scoring.outcome import Outcome, Sample, score_sample

USERS = (KeyboardInterrupt, SystemExit, BdbQuit)
"""Exceptions with which the user, a signal or a debugger ends the run: they are no failures of the function."""


class RewardHere:
    """In the place of `RewardProcesses`: the same outcomes, but nothing ends a call that takes too long.

    Raises ConfigError when the function cannot be loaded.
    """

    def __init__(self, source: RewardSource) -> None:
        self._function = load_reward_function(source)

    def __enter__(self) -> Self:
        """No-op."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """No-op."""

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One outcome per sample, in order."""
        return [score_sample(self._function, sample, passing=USERS) for sample in samples]
