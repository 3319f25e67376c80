"""Measure kernels: matrix products by shape, attention by length, memory, host copies, small operations,
all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from megatron_rl.device import Device, settled_seconds
from megatron_rl.profile.samples import (
    ALL_REDUCE,
    ATTENTION,
    COPY,
    HEAD_SIZE,
    HEADS,
    HOST_COPY,
    MATMUL,
    SMALL,
    WIDTH,
    MeasuredSample,
)

ROWS = (16, 64, 256, 1024)
LENGTHS = (128, 512, 1024)
COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
HOST_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}


def timed(body: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the seconds of `body`: the lower quartile of `repeats` calls after one warm-up call.

    Other work of the machine only adds time. The ranks of a world start each call together; all must call.
    """
    seconds = []
    for _ in range(repeats + 1):
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()
        start = settled_seconds(device)
        body()
        seconds.append(settled_seconds(device) - start)
    return sorted(seconds[1:])[repeats // 4]


def kernel_samples(device: Device, repeats: int) -> Iterator[MeasuredSample]:
    """Measure this rank while all others of its world do the same; all must call. size: rows, tokens or bytes."""
    on, kind = device.torch_device, device.kind
    for dtype in (torch.float32, torch.bfloat16):
        width = WIDTH[kind]
        weight = torch.randn(width, width, device=on, dtype=dtype)
        for rows in ROWS:
            inputs = torch.randn(rows, width, device=on, dtype=dtype)
            seconds = timed(partial(torch.matmul, inputs, weight), on, repeats)
            yield MeasuredSample(f"{MATMUL} {str(dtype).removeprefix('torch.')}", seconds, size=rows)
    dtype, attend = torch.float32 if kind == "cpu" else torch.bfloat16, torch.nn.functional.scaled_dot_product_attention
    for length in LENGTHS:
        heads = torch.randn(1, HEADS, length, HEAD_SIZE, device=on, dtype=dtype)
        seconds = timed(partial(attend, heads, heads, heads, is_causal=True), on, repeats)
        yield MeasuredSample(ATTENTION, seconds, size=length)
    source = torch.ones(COPY_BYTES[kind] // 4, device=on)
    target = torch.empty_like(source)
    yield MeasuredSample(COPY, timed(partial(target.copy_, source), on, repeats), size=COPY_BYTES[kind])
    on_host = torch.ones(HOST_BYTES[kind] // 4, pin_memory=kind == "cuda")
    arrived = torch.empty(len(on_host), device=on)
    yield MeasuredSample(HOST_COPY, timed(partial(arrived.copy_, on_host), on, repeats), size=HOST_BYTES[kind])
    yield MeasuredSample(SMALL, timed(partial(small_operations, on), on, repeats), size=2000)


def small_operations(device: torch.device) -> None:
    """Run many tiny operations, like the layers of a small model: Python with little arithmetic."""
    values = torch.ones(64, 64, device=device)
    for _ in range(1000):
        values = values * 0.5 + 1.0


BYTES = {"cpu": (4, 1 << 16, 1 << 22), "cuda": (4, 1 << 20, 1 << 28)}
SMALL_ROUNDS = 50
"""Calls of the smallest message that are timed together: one is too short."""


def collective_samples(device: Device, group_sizes: Sequence[int], repeats: int) -> Iterator[MeasuredSample]:
    """Measure one all-reduce while all groups of that size do the same. Every rank of the world must call."""
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
