"""Start, describe and kill the processes of one pool."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

import psutil
import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from megatron_rl.cluster.fork_server import fork_command
from megatron_rl.cluster.leftovers import RUN_ID
from megatron_rl.cluster.ranks import Ranks
from megatron_rl.cluster.worker_process import ProcessInfo

_EXIT_TIMEOUT_S = 10.0


class Processes:
    """One Ray process on every rank. handles, infos: in rank order, once there are any.

    env: variables of every process, in addition to its place in the world. preload: as in `PoolOptions`.
    """

    def __init__(self, ranks: Ranks, env: Mapping[str, str], preload: Sequence[str] = ()) -> None:
        self.handles: list[ActorHandle] = []
        self.infos: list[ProcessInfo] = []
        self._ranks, self._env, self._preload = ranks, env, preload
        self._descriptions: list[ObjectRef] = []
        self._to_end: list[psutil.Process] = []

    def spawn(self, process_class: type) -> None:
        """Start `process_class(rank)` on every rank and do not wait."""
        for rank in range(self._ranks.world_size):
            self.handles.append(self._spawn(process_class, rank))
        self._descriptions = [handle.describe_process.remote() for handle in self.handles]

    @property
    def descriptions(self) -> list[ObjectRef]:
        """Answers that are ready once the processes are up."""
        return list(self._descriptions)

    def describe(self) -> list[ProcessInfo]:
        """Return where the processes run; all must be up. Raises RayError for a process that has died."""
        if not self.infos:
            self.infos = ray.get(self._descriptions)
            for info in self.infos:
                if info.is_local:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        self._to_end.append(psutil.Process(info.pid))
        return self.infos

    def kill(self) -> None:
        """Kill all processes and do not wait; a second call does nothing."""
        handles, self.handles = self.handles, []
        # Without Ray they are gone, and ray.kill would start Ray again, or wait for a server that is gone.
        if ray.is_initialized() and not self._ranks.is_lost:
            for handle in handles:
                ray.kill(handle)

    def wait_until_gone(self) -> None:
        """After `kill`: wait until the processes on this node are gone; kill those that are not within 10 s.

        Stopped processes are killed at once, as they cannot end by themselves. A second call does nothing.
        """
        processes, self._to_end = self._to_end, []
        if not ray.is_initialized() or self._ranks.is_lost:
            return
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_STOPPED:
                    process.kill()
        _, left = psutil.wait_procs(processes, _EXIT_TIMEOUT_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

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
            run_id = {RUN_ID: ranks.variables.get(RUN_ID, "")}
            runtime["py_executable"] = fork_command(self._preload, shared | run_id)
        return ray.remote(process_class).options(**options, runtime_env=runtime).remote(rank)
