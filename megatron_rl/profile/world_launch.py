"""Start the ranks of one world, have them measure, and leave no process behind."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

from megatron_rl.cluster.local_launcher import LocalLauncher
from megatron_rl.cluster.pool import ProcessPool
from megatron_rl.cluster.pool_options import PoolOptions
from megatron_rl.config.load import read_run
from megatron_rl.config.roles import PoolSize
from megatron_rl.dispatch import Coordinates, Dispatch, remote_method
from megatron_rl.errors import WorkerFailure
from megatron_rl.observe.console import quiet_libraries
from megatron_rl.profile.samples import MeasuredSample, MeasuringTask, World, slowest
from megatron_rl.roles.environment import worker_environment
from megatron_rl.roles.preloaded import preloaded

COLLECTIVE_LIMIT = timedelta(seconds=120)
"""Longest wait in a collective: other ranks may still be building."""


class MeasuringRank:
    """A host (see `ProcessPool`) of a run as a configuration file says. Raises ValueError for an invalid file."""

    def __init__(self, config: Path) -> None:
        from megatron_rl.roles.host import RankHost

        quiet_libraries()
        reading = read_run(config, ())
        if reading.config is None:
            raise ValueError(f"{config} is no configuration: {reading.violations}")
        self._host = RankHost(reading.config, COLLECTIVE_LIMIT)

    @remote_method(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> Coordinates:
        """Return this rank's place."""
        place: Coordinates = self._host.coordinates()  # type: ignore[assignment]  # a rank calls it, not the controller
        return place

    @remote_method(Dispatch.ONE_TO_ALL)
    def measure(self, task: MeasuringTask) -> list[MeasuredSample]:
        """Measure everything that the task asks for; all ranks of its world must call."""
        from megatron_rl.profile.measurements import build, generation_samples, kernel_samples, pass_samples

        host = self._host
        samples = list(kernel_samples(host.device, task.repeats)) if task.kernels else []
        if task.passes or task.generations:
            build(host, task)
            samples += pass_samples(host, host.device, task)
        if task.generations:
            samples += generation_samples(host, host.device, task)
        return samples


class Worlds(LocalLauncher):
    """Starts worlds of ranks on this machine, one after the other, and ends them.

    ranks_per_machine: that a rank's threads are counted for.
    """

    def __init__(self, device: str, ranks_per_machine: int) -> None:
        variables = worker_environment(device, ranks_per_machine) | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        super().__init__(device, preloaded(device, generates=True), variables)

    @property
    def folder(self) -> Path:
        """A folder for files that must not outlive the profile."""
        return self.scratch.folder

    def run(self, task: MeasuringTask, config: Path, time_limit_s: float) -> World:
        """Run every rank of the task's world in a process of its own.

        Raises WorkerFailure when one fails, or when they take longer than the limit.
        """
        deadline = time.monotonic() + time_limit_s
        with self.reserve(PoolSize(1, task.world_size)) as ranks:
            pool = ProcessPool("profile", ranks, MeasuringRank, config, options=PoolOptions(env=self._variables))
            try:
                pool.begin().get(time_limit_s)
                samples = pool.host(MeasuringRank).measure(task).get(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise WorkerFailure(f"measuring took longer than {time_limit_s:.0f} s, and was ended") from None
            finally:
                pool.shutdown()
        return World(task, slowest(samples))
