"""Start, describe and kill the processes of one pool."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, wait

from megatron_rl.cluster.launcher import ProcessInfo, RankProcess, Ranks
from megatron_rl.cluster.loading import import_path

_EXIT_TIMEOUT_S = 10.0


class Processes:
    """One process on every rank of a pool or replica. started, infos: in rank order, once there are any.

    env: variables of every process, in addition to its place in the world.
    """

    def __init__(self, name: str, ranks: Ranks, env: Mapping[str, str]) -> None:
        self.started: list[RankProcess] = []
        self.infos: list[ProcessInfo] = []
        self._name, self._ranks, self._env = name, ranks, env

    def spawn(self) -> None:
        """Start a process on every rank and do not wait."""
        for rank in range(self._ranks.world_size):
            self.started.append(self._ranks.start(rank, self._variables(rank)))

    def coming_up(self) -> list[Future[ProcessInfo]]:
        """Return replies that are ready once the processes are up, or have failed to."""
        return [process.info for process in self.started]

    def describe(self) -> list[ProcessInfo]:
        """Return where the processes run; all must be up. Raises ProcessDied."""
        if not self.infos:
            self.infos = [process.info.result() for process in self.started]
        return self.infos

    def kill(self) -> None:
        """Kill all processes and do not wait."""
        for process in self.started:
            process.kill()

    def wait_until_gone(self) -> None:
        """After `kill`: wait until the processes are gone, 10 s at most."""
        if not self._ranks.is_lost:
            wait([process.ended for process in self.started], _EXIT_TIMEOUT_S)

    def _variables(self, rank: int) -> dict[str, str]:
        ranks = self._ranks
        return {
            "PYTHONPATH": import_path(),
            **self._env,
            **ranks.variables,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks.world_size),
            "LOCAL_RANK": str(ranks.device_index(rank)),
            "LOCAL_WORLD_SIZE": str(ranks.local_world_size(rank)),
            "POOL_NAME": self._name,
        }
