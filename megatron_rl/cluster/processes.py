"""The processes of one pool: spawned without waiting, described once they are up, and killed."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence

import psutil
import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from megatron_rl.cluster.fork_server import fork_command
from megatron_rl.cluster.leftovers import MARK
from megatron_rl.cluster.ranks import Ranks
from megatron_rl.cluster.worker_process import ProcessInfo

_EXIT_TIMEOUT_S = 10.0


class Processes:
    """One process of Ray's on every rank. handles, infos: in rank order, once there are any.

    env: variables of each, beside its place in its world. preload: modules that a node imports once for all of its
    ranks (see `fork_server`); where there are none, each process is started by itself.
    """

    def __init__(self, ranks: Ranks, env: Mapping[str, str], preload: Sequence[str] = ()) -> None:
        self.handles: list[ActorHandle] = []
        self.infos: list[ProcessInfo] = []
        self._ranks, self._env, self._preload = ranks, env, preload
        self._descriptions: list[ObjectRef] = []
        self._to_end: list[psutil.Process] = []

    def spawn(self, process_class: type) -> None:
        """Begin to start `process_class(rank)` on every rank; do not wait."""
        for rank in range(self._ranks.world_size):
            self.handles.append(self._spawn(process_class, rank))
        self._descriptions = [handle.describe_process.remote() for handle in self.handles]

    @property
    def descriptions(self) -> list[ObjectRef]:
        """What is there once the processes are up."""
        return list(self._descriptions)

    def describe(self) -> list[ProcessInfo]:
        """Where they run; all must be up. Raises RayError for one that is not any more."""
        if not self.infos:
            self.infos = ray.get(self._descriptions)
            for info in self.infos:
                if info.is_local:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        self._to_end.append(psutil.Process(info.pid))
        return self.infos

    def kill(self) -> None:
        """Kill all, and do not wait. Repeating it is free."""
        handles, self.handles = self.handles, []
        # Without Ray they are gone, and ray.kill would start it again, or wait for a server that is gone.
        if ray.is_initialized() and not self._ranks.is_lost:
            for handle in handles:
                ray.kill(handle)

    def wait_until_gone(self) -> None:
        """After `kill`: until those on this node are gone. Repeating it is free."""
        processes, self._to_end = self._to_end, []
        if ray.is_initialized() and not self._ranks.is_lost:
            wait_until_gone(processes)

    def _spawn(self, process_class: type, rank: int) -> ActorHandle:
        ranks = self._ranks
        shared = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), **self._env}
        env = {
            **shared,
            **ranks.variables,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks.world_size),
            "LOCAL_RANK": str(ranks.device_index(rank)),
            "LOCAL_WORLD_SIZE": str(ranks.local_world_size(rank)),
        }
        options = ranks.actor_options(rank) | {"max_restarts": 0, "max_concurrency": 1}
        runtime: dict[str, object] = {"env_vars": env}
        if self._preload:
            mark = {MARK: ranks.variables.get(MARK, "")}
            runtime["py_executable"] = fork_command(self._preload, shared | mark)
        return ray.remote(process_class).options(**options, runtime_env=runtime).remote(rank)


def wait_until_gone(processes: Sequence[psutil.Process]) -> None:
    """Return when these processes of this node have ended; those that outlive the time-out are killed.

    So are those that are stopped, at once: they cannot end by themselves.
    """
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    while processes := [process for process in processes if process.is_running()]:
        is_late = time.monotonic() > deadline
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if is_late or process.status() == psutil.STATUS_STOPPED:
                    process.kill()
        if is_late:
            return
        time.sleep(0.02)
