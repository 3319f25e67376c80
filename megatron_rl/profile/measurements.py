"""What a rank measures: kernels, passes of an actor and a critic, and generation.

Passes and generation are those of the roles of a run, without a controller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.columns import ACTOR_UPDATE, CRITIC_UPDATE, SCORING
from megatron_rl.device import Device, settled_seconds
from megatron_rl.profile.samples import (
    ALL_REDUCE,
    ATTENTION,
    COPY,
    GENERATE,
    HEAD_SIZE,
    HEADS,
    HOST_COPY,
    MATMUL,
    SCORE,
    SCORE_ALONE,
    SMALL,
    UPDATE,
    WIDTH,
    Case,
    MeasuredSample,
    MeasuringTask,
)
from megatron_rl.records import Batch, Sampling, ragged, ragged_from_lengths, single_turn
from megatron_rl.roles.host import RankHost
from megatron_rl.rollout.slices import Slice, Start

ROWS = (16, 64, 256, 1024)
LENGTH = 1024
COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
HOST_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
REDUCED_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}
FIRST_TOKEN, LAST_TOKEN = 8, 60
"""Range of token ids in the probe's vocabulary, without special tokens."""


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
    heads = torch.randn(1, HEADS, LENGTH, HEAD_SIZE, device=on, dtype=dtype)
    yield MeasuredSample(
        ATTENTION, timed(partial(attend, heads, heads, heads, is_causal=True), on, repeats), size=LENGTH
    )
    source = torch.ones(COPY_BYTES[kind] // 4, device=on)
    target = torch.empty_like(source)
    yield MeasuredSample(COPY, timed(partial(target.copy_, source), on, repeats), size=COPY_BYTES[kind])
    on_host = torch.ones(HOST_BYTES[kind] // 4, pin_memory=kind == "cuda")
    arrived = torch.empty(len(on_host), device=on)
    yield MeasuredSample(HOST_COPY, timed(partial(arrived.copy_, on_host), on, repeats), size=HOST_BYTES[kind])
    yield MeasuredSample(SMALL, timed(partial(small_operations, on), on, repeats), size=2000)
    if dist.is_initialized() and dist.get_world_size() > 1:
        values = torch.ones(REDUCED_BYTES[kind] // 4, device=on)
        yield MeasuredSample(ALL_REDUCE, timed(partial(dist.all_reduce, values), on, repeats), size=REDUCED_BYTES[kind])


def small_operations(device: torch.device) -> None:
    """Run many tiny operations, like the layers of a small model: Python with little arithmetic."""
    values = torch.ones(64, 64, device=device)
    for _ in range(1000):
        values = values * 0.5 + 1.0


def build(host: RankHost, task: MeasuringTask) -> None:
    """Build the roles that the task measures, like a run; all ranks must call."""
    for role in ("actor", "critic", *(("rollout",) if task.generations else ())):
        host.build(role)


def pass_samples(host: RankHost, device: Device, task: MeasuringTask) -> Iterator[MeasuredSample]:
    """Measure scores and updates of actor and critic; all ranks must call."""
    for case in task.passes:
        batch = random_batch(case, host.groups.dp_rank)
        calls: list[tuple[str, str, str, Any]] = [
            (SCORE, "actor", "log_probs", batch.read_by(SCORING)),
            (SCORE, "critic", "values", batch.read_by(SCORING)),
            (UPDATE, "actor", "update", batch.read_by(ACTOR_UPDATE)),
            (UPDATE, "critic", "update", batch.read_by(CRITIC_UPDATE)),
        ]
        for kind, role, method, argument in calls:
            body = partial(host.run, role, method, (argument,), {})
            seconds = timed(body, device.torch_device, task.repeats)
            yield MeasuredSample(kind, seconds, case.rows, case.prompt, case.response)
            if task.alone and kind == SCORE:
                seconds = timed(body if host.groups.dp_rank == 0 else list, device.torch_device, task.repeats)
                yield MeasuredSample(SCORE_ALONE, seconds, case.rows, case.prompt, case.response)


def generation_samples(host: RankHost, device: Device, task: MeasuringTask) -> Iterator[MeasuredSample]:
    """Measure generation in rollout mode, with a fixed number of tokens per row; all ranks must call."""
    rollout: Any = host.roles["rollout"]
    host.run("rollout", "enter", (), {})
    for case in task.generations:
        answers = {rollout.replica: Slice(version=0, num_steps=None, starts=random_starts(case))}
        body = partial(host.run, "rollout", "advance", (answers,), {})
        seconds = timed(body, device.torch_device, task.repeats)
        yield MeasuredSample(GENERATE, seconds, case.rows, case.prompt, case.response)
    host.run("rollout", "exit", (), {})


def random_batch(case: Case, seed: int) -> Batch:
    """Return random tokens of a case's lengths, with every column that an update reads."""
    generator = torch.Generator().manual_seed(seed)
    responses = torch.full((case.rows,), case.response)

    def noise() -> torch.Tensor:
        values = torch.randn(case.rows * case.response, generator=generator)
        return ragged_from_lengths(0.1 * values, responses)

    return single_turn(
        ragged([tokens(case.prompt + case.response, generator) for _ in range(case.rows)]),
        responses,
        old_log_probs=noise(),
        old_values=noise(),
        advantages=noise(),
        returns=noise(),
    )


def random_starts(case: Case) -> tuple[Start, ...]:
    """Return requests with random prompts, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=case.response, salt=0)
    prompts = (tuple(tokens(case.prompt, generator).tolist()) for _ in range(case.rows))
    return tuple(Start(row, prompt, row, case.response, sampling) for row, prompt in enumerate(prompts))


def tokens(number: int, generator: torch.Generator) -> torch.Tensor:
    """Return random token ids [number]."""
    return torch.randint(FIRST_TOKEN, LAST_TOKEN, (number,), generator=generator)
