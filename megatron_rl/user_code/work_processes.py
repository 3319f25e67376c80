"""The driver's side of a keeper: start it, send jobs, take answers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from types import TracebackType
from typing import Any, Self

from megatron_rl.errors import RewardError
from megatron_rl.user_code.keeper import Cancel, Job, KeeperSettings, Notice, Take

KEEPER = """
import sys
from multiprocessing.connection import Connection
driver = Connection(int(sys.argv[1]))
sys.path[:] = driver.recv()
from megatron_rl.user_code.keeper import keep
keep(driver)
"""
"""The keeper's program. It needs a fresh interpreter, because a driver with threads cannot fork safely."""

EXIT_TIMEOUT_S = 10.0


class WorkProcesses:
    """A context manager: inside it a keeper and its workers wait for jobs. The constructor starts nothing.

    Methods raise RewardError when no worker can load the user's code, and when the keeper has been killed.
    """

    def __init__(self, settings: KeeperSettings):
        self.settings = settings
        self._sending = threading.Lock()

    def __enter__(self) -> Self:
        """Start the processes and do not wait for them; they load the user's code meanwhile."""
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

    def submit(self, jobs: Sequence[Job]) -> None:
        """Have jobs done; the answers come with `take`. Any thread may call this."""
        self._send(list(jobs))

    def notify(self, notice: Notice) -> None:
        """Send something to the worker of a key, without an answer."""
        self._send(notice)

    def cancel(self) -> None:
        """Give up all jobs so far; no answer to them comes."""
        self._send(Cancel())

    def take(self, waits: bool) -> list[tuple[int, Any]]:
        """Return (number, answer) of the jobs that are done. waits: until one is, if any is open."""
        self._send(Take(waits))
        try:
            answer: list[tuple[int, Any]] | str = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RewardError(f"the process that keeps the workers of {self.settings.work.noun} has died") from error
        if isinstance(answer, str):
            raise RewardError(answer)
        return answer

    def _send(self, message: list[Job] | Take | Notice | Cancel) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError as error:
            raise RewardError(f"the process that keeps the workers of {self.settings.work.noun} has died") from error
