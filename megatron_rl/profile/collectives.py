"""Latency and bandwidth of collectives by group size, among the ranks of a world."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from megatron_rl.device import Device
from megatron_rl.profile.kernels import timed
from megatron_rl.profile.samples import ALL_REDUCE, MeasuredSample

BYTES = {"cpu": (4, 1 << 16, 1 << 22), "cuda": (4, 1 << 20, 1 << 28)}
SMALL_ROUNDS = 50
"""Of the smallest message, which one call is too short to time."""


def collective_samples(device: Device, group_sizes: Sequence[int], repeats: int) -> Iterator[MeasuredSample]:
    """Seconds of one all-reduce, while all groups of that size do the same; every rank of the world must call."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for size in group_sizes:
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
        mine = groups[rank // size]
        for num_bytes in BYTES[device.kind]:
            values = torch.ones(num_bytes // 4, device=device.torch_device)
            rounds = SMALL_ROUNDS if num_bytes == 4 else 1

            def reduce(values: torch.Tensor = values, rounds: int = rounds, mine: dist.ProcessGroup = mine) -> None:
                for _ in range(rounds):
                    dist.all_reduce(values, group=mine)

            seconds = timed(reduce, device.torch_device, repeats) / rounds
            yield MeasuredSample(ALL_REDUCE, seconds, size=num_bytes, group=size)
