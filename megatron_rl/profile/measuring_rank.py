"""One rank of a world that is measured."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from megatron_rl.config.load import read_run
from megatron_rl.dispatch import Coordinates, Dispatch, remote_method
from megatron_rl.observe.console import quiet_libraries
from megatron_rl.profile.samples import MeasuredSample, MeasuringTask

TIMEOUT = timedelta(seconds=120)
"""Longest wait in a collective: other ranks may still be building."""


class MeasuringRank:
    """A host (see `ProcessPool`) of a run as a configuration file says. Raises ValueError for an invalid file."""

    def __init__(self, config: Path) -> None:
        from megatron_rl.roles.host import RankHost

        quiet_libraries()
        reading = read_run(config, ())
        if reading.config is None:
            raise ValueError(f"{config} is no configuration: {reading.violations}")
        self._host = RankHost(reading.config, TIMEOUT)

    @remote_method(Dispatch.ONE_TO_ALL)
    def coordinates(self) -> Coordinates:
        """Return this rank's place."""
        place: Coordinates = self._host.coordinates()  # type: ignore[assignment]  # a rank calls it, not the controller
        return place

    @remote_method(Dispatch.ONE_TO_ALL)
    def measure(self, task: MeasuringTask) -> list[MeasuredSample]:
        """Measure everything that the task asks for; all ranks of its world must call."""
        from megatron_rl.profile.kernels import collective_samples, kernel_samples
        from megatron_rl.profile.measured_passes import build, generation_samples, pass_samples

        host = self._host
        samples = list(kernel_samples(host.device, task.repeats)) if task.kernels else []
        samples += collective_samples(host.device, task.collectives, task.repeats)
        if task.passes or task.generations:
            build(host, task)
            samples += pass_samples(host, host.device, task)
        if task.generations:
            samples += generation_samples(host, host.device, task)
        return samples
