"""The process of one rank: python -m megatron_rl.profile.rank_process TASK.json CONFIG.yaml ANSWER.json."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from megatron_rl.cluster.loading import without_collections
from megatron_rl.config.load import read_run
from megatron_rl.observe.console import quiet_engines, quiet_libraries
from megatron_rl.profile.samples import MeasuredSample, MeasuringTask, read_task, write_samples

TIMEOUT = timedelta(seconds=120)
"""Longest wait in a collective: other ranks may still be building."""


def measure(task: MeasuringTask, config: Path) -> Iterator[MeasuredSample]:
    """Measure everything that the task asks for; all ranks of its world must call."""
    with without_collections():
        from megatron_rl.profile.kernels import collective_samples, kernel_samples
        from megatron_rl.profile.measured_passes import build, generation_samples, pass_samples
        from megatron_rl.roles.host import RankHost

    reading = read_run(config, ())
    if reading.config is None:
        raise ValueError(f"{config} is no configuration: {reading.violations}")
    host = RankHost(reading.config, TIMEOUT)
    if task.kernels:
        yield from kernel_samples(host.device, task.repeats)
    yield from collective_samples(host.device, task.collectives, task.repeats)
    if task.passes or task.generations:
        build(host, task)
        yield from pass_samples(host, host.device, task)
    if task.generations:
        yield from generation_samples(host, host.device, task)


def main() -> None:
    """Measure and write the samples."""
    task_file, config, answer = map(Path, sys.argv[1:])
    quiet_libraries()
    quiet_engines()
    write_samples(measure(read_task(task_file), config), answer)


if __name__ == "__main__":
    main()
