"""The driver's end of the reward processes: start them once, hand batches over, and be sure that they end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from types import TracebackType
from typing import Self

from megatron_rl.errors import RewardError
from megatron_rl.scoring.keeper import KeeperSettings
from megatron_rl.scoring.outcome import Outcome, Sample

KEEPER = """
import sys
from multiprocessing.connection import Connection
driver = Connection(int(sys.argv[1]))
sys.path[:] = driver.recv()
from megatron_rl.scoring.keeper import keep
keep(driver)
"""
"""The keeper's program. A fresh interpreter, because a driver with threads cannot fork safely."""

PATIENCE_S = 10.0


class RewardProcesses:
    """A context manager: inside it a keeper and its workers wait for samples."""

    def __init__(self, settings: KeeperSettings):
        """Nothing is started yet."""
        self.settings = settings

    def __enter__(self) -> Self:
        """Start the processes without waiting for them; they load the reward function meanwhile."""
        self._connection, theirs = Pipe()
        # Its own session: Ctrl-C is the driver's business, which then ends it.
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
        """End all of them, whatever they are doing."""
        self._connection.close()
        try:
            self._keeper.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One outcome per sample, in order; takes as long as the slowest. Raises RewardError if nothing can be scored,
        because the function cannot be loaded in the workers or because the keeper was killed.
        """
        try:
            self._connection.send(list(samples))
            answer: list[Outcome] | str = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RewardError("the process that keeps the reward workers has died") from error
        if isinstance(answer, str):
            raise RewardError(answer)
        return answer
