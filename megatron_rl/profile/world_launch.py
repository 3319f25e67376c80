"""Start the ranks of one world, wait for their samples, and leave no process behind."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from megatron_rl.cluster.local_launcher import LocalLauncher
from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.pool_options import PoolOptions
from megatron_rl.config.roles import PoolSize
from megatron_rl.errors import WorkerFailure
from megatron_rl.profile.measuring_rank import MeasuringRank
from megatron_rl.profile.samples import MeasuringTask, World, slowest
from megatron_rl.roles.environment import worker_environment
from megatron_rl.roles.preloaded import preloaded


class Worlds:
    """Starts worlds of ranks on this machine, one after the other, and ends them.

    ranks_per_machine: that a rank's threads are counted for.
    """

    def __init__(self, device: str, ranks_per_machine: int) -> None:
        self._variables = worker_environment(device, ranks_per_machine) | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        self._launcher = LocalLauncher(device, preloaded(device, generates=True), self._variables)

    def __enter__(self) -> Worlds:
        """Find a place for files. Raises ConfigError without one."""
        self._launcher.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._launcher.__exit__(kind, error, trace)

    @property
    def folder(self) -> Path:
        """A folder for files that must not outlive the profile."""
        return self._launcher.scratch.folder

    def run(self, task: MeasuringTask, config: Path, time_limit_s: float) -> World:
        """Run every rank of the task's world in a process of its own.

        Raises WorkerFailure when one fails, or when they take longer than the limit.
        """
        deadline = time.monotonic() + time_limit_s
        with self._launcher.reserve(PoolSize(1, task.world_size)) as ranks:
            pool = ProcessPool("profile", ranks, MeasuringRank, config, options=PoolOptions(env=self._variables))
            try:
                pool.begin().get(time_limit_s)
                samples = pool.host(MeasuringRank).measure(task).get(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise WorkerFailure(f"measuring took longer than {time_limit_s:.0f} s, and was ended") from None
            finally:
                pool.shutdown()
        return World(task, slowest(samples))
