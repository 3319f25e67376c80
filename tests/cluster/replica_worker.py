"""A worker of a training pool or of a replica, without torch: one role, which fails and hangs on demand."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

from megatron_rl.dispatch import Coordinates, Dispatch, remote_method
from megatron_rl.roles.environment import RankEnvironment

ROLE = "sampler"


class Sampler:
    @remote_method(Dispatch.REPLICAS, phase="gen")
    def count(self, number: int, seconds: float = 0.0) -> tuple[int, int]:
        """Sleep; then the number and the process that got it."""
        time.sleep(seconds)
        return number, os.getpid()

    @remote_method(Dispatch.REPLICAS, phase="gen")
    def count_once_there(self, number: int, file: str) -> tuple[int, int]:
        """Wait for a file; then the number and the process that got it."""
        while not os.path.exists(file):
            time.sleep(0.01)
        return number, os.getpid()

    @remote_method(Dispatch.ONE_TO_ALL)
    def sleep_on(self, rank: int, seconds: float) -> int:
        """Sleep on one rank; its own rank."""
        own = int(os.environ["RANK"])
        if own == rank:
            time.sleep(seconds)
        return own

    @remote_method(Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise OSError("no room")


class ReplicaHost:
    """host_class of a cluster: hears the name of the pool of the configuration, not of the replica.

    A host whose `slow_file` exists sleeps for a minute in its constructor.
    """

    def __init__(self, slow_file: str, pool: str) -> None:
        self.pool, self.place = pool, RankEnvironment.read()
        self.role = Sampler()
        if os.path.exists(slow_file):
            time.sleep(60)

    @remote_method(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> Coordinates:
        rank, size = self.place.rank, self.place.world_size
        return Coordinates(rank, rank, size, True, 0, 1, rank == 0)

    @remote_method(Dispatch.ONE_TO_ALL)
    def where(self) -> tuple[str, RankEnvironment, int]:
        """The pool's name, the rank's place, LOCAL_WORLD_SIZE."""
        return self.pool, self.place, int(os.environ["LOCAL_WORLD_SIZE"])

    @remote_method(Dispatch.ONE_TO_ALL)
    def start_child(self) -> int:
        """A child process that ignores its parent's end; its pid."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    def run(self, role: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self.role, name)(*args, **kwargs)
