"""Ray for as long as it is needed: started on this machine, or joined where RAY_ADDRESS names a running cluster."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from types import TracebackType
from typing import Self

import ray

from megatron_rl.cluster import ray_server
from megatron_rl.cluster.daemons import DaemonWatch
from megatron_rl.cluster.daemons import children as daemon_children
from megatron_rl.cluster.leftovers import MARK, end, marked
from megatron_rl.cluster.reaper import Reaper
from megatron_rl.errors import ConfigError, RewardError, StoppedAfterStep, StoppedBeforeStep, WorkerFailure

_NO_FAULT_OF_PROCESSES = (ConfigError, RewardError, StoppedAfterStep, StoppedBeforeStep)
"""Errors after which nobody looks for the reason in the logs of Ray's processes."""


class RaySession:
    """Ray inside a `with` block; on leaving it is shut down, unless it was initialised in this process before, and its
    variables in the environment are as they were.

    num_ranks: of all pools; a Ray that is started here has a CPU for each of them.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._reaper: Reaper | None = None  # present when Ray was started or joined here, and so is the watch
        self._watch: DaemonWatch | None = None
        self._variables: dict[str, str] = {}  # Ray's, as they were before

    def __enter__(self) -> Self:
        """Raises ConfigError when Ray cannot be started or joined."""
        try:
            if not ray.is_initialized():
                self._start()
        except BaseException as error:
            self._release(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release(error)

    @property
    def is_lost(self) -> bool:
        """Whether Ray itself is gone, so that no call into it would return."""
        return self._watch is not None and self._watch.lost != ""

    @property
    def variables(self) -> dict[str, str]:
        """What every rank's environment must hold, on whichever machine it is."""
        return {MARK: self._reaper.scratch.mark} if self._reaper is not None else {}

    def _start(self) -> None:
        address = os.environ.get("RAY_ADDRESS") or "local"
        self._variables = ray_server.variables()
        self._reaper = Reaper()
        with self._reaper.marking():
            if address == "local":
                # One CPU per rank, however many there are: ranks on CPU take turns on the cores this machine has.
                ray_server.start(self._num_ranks, self._reaper.scratch.ray_folder)
                daemons, server = daemon_children(), None
            else:
                daemons, server = ray_server.join(address)
        self._watch = DaemonWatch(daemons, server, self._kill_marked)

    def _kill_marked(self) -> None:
        reaper = self._reaper
        if reaper is not None:
            end(lambda: marked(reaper.scratch.mark), patience_s=0.0)

    def _release(self, error: BaseException | None) -> None:
        """Give everything back. Raises WorkerFailure where Ray itself was lost, as nothing else can then be true."""
        lost = self._watch.stop() if self._watch is not None else ""
        self._watch = None
        if self._reaper is not None:
            if not lost:
                ray.shutdown()
            self._reaper.stop(clean=not isinstance(error, Exception) or isinstance(error, _NO_FAULT_OF_PROCESSES))
            self._reaper = None
            ray_server.put_back(self._variables)
        if lost:
            atexit.register(_exit_without_ray)
            raise WorkerFailure(lost) from None


def _exit_without_ray() -> None:
    """End this process before Ray's own exit handler does, which waits a minute for its server and then aborts."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(WorkerFailure.exit_code)
