"""Call the reward function in processes of its own (`RewardProcesses`) or in this process (`RewardHere`)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from bdb import BdbQuit
from collections.abc import Sequence
from multiprocessing import Pipe
from types import TracebackType
from typing import Any, Self

from megatron_rl.errors import RewardError
from megatron_rl.scoring.function import RewardSource, load_reward_function
from megatron_rl.scoring.keeper import KeeperSettings
from megatron_rl.scoring.outcome import Outcome, Sample, score_sample

KEEPER = """
import sys
from multiprocessing.connection import Connection
driver = Connection(int(sys.argv[1]))
sys.path[:] = driver.recv()
from megatron_rl.scoring.keeper import keep
keep(driver)
"""
"""The keeper's program. It needs a fresh interpreter, because a driver with threads cannot fork safely."""

EXIT_TIMEOUT_S = 10.0

USERS = (KeyboardInterrupt, SystemExit, BdbQuit)
"""Exceptions with which the user, a signal or a debugger ends the run: they are no failures of the function."""


class RewardProcesses:
    """A context manager: inside it a keeper and its workers wait for samples. The constructor starts nothing."""

    def __init__(self, settings: KeeperSettings):
        self.settings = settings

    def __enter__(self) -> Self:
        """Start the processes and do not wait for them; they load the reward function meanwhile."""
        self._connection, theirs = Pipe()
        # Ctrl-C must not reach the keeper: the driver handles it, and then ends the keeper.
        self._keeper = subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._connection.send(sys.path)
        self._connection.send(self.settings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes, also those that are busy."""
        self._connection.close()
        try:
            self._keeper.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample, in order; takes as long as the slowest sample.

        Raises RewardError when no worker can load the function, and when the keeper has been killed.
        """
        try:
            self._connection.send(list(samples))
            answer: list[Outcome] | str = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RewardError("the process that keeps the reward workers has died") from error
        if isinstance(answer, str):
            raise RewardError(answer)
        return answer


class RewardHere(contextlib.nullcontext[Any]):
    """Replaces `RewardProcesses` in a run that is one process, for a debugger. Nothing ends a call that takes too long.

    Raises ConfigError when the function cannot be loaded.
    """

    def __init__(self, source: RewardSource) -> None:
        super().__init__(self)
        self._function = load_reward_function(source)

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample, in order."""
        return [score_sample(self._function, sample, passing=USERS) for sample in samples]
