"""Measure passes of an actor and a critic, and generation, with the roles of a run but without a controller."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megatron_rl.columns import ACTOR_UPDATE, CRITIC_UPDATE, SCORING
from megatron_rl.device import Device
from megatron_rl.profile.kernels import timed
from megatron_rl.profile.samples import GENERATE, SCORE, SCORE_ALONE, UPDATE, Case, MeasuredSample, MeasuringTask
from megatron_rl.records import Batch, Sampling, ragged, ragged_from_lengths, single_turn
from megatron_rl.roles.host import RankHost
from megatron_rl.rollout.slices import Slice, Start

FIRST_TOKEN, LAST_TOKEN = 8, 60
"""Range of token ids in the probe's vocabulary, without special tokens."""


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
