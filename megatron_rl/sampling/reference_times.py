"""References for an asynchronous run: seconds of the same work done synchronously, and a lower bound."""

from __future__ import annotations

from megatron_rl.sampling.engine_model import Costs, draw
from megatron_rl.sampling.schedule_types import ScheduleConfig
from megatron_rl.sampling.simulate import Lengths


def synchronous(rules: ScheduleConfig, num_replicas: int, lengths: Lengths, costs: Costs) -> float:
    """Mean seconds of a step that generates its batch, trains it and sends weights, one after the other on all ranks.

    num_replicas and costs.train_seconds are those of all ranks together: more replicas and fewer seconds than in a run
    with two pools on the same ranks. Each batch is split into equal chunks, as a synchronous run does.
    """
    steps = range(rules.first_step, rules.num_steps_total + 1)
    seconds = [_draw_seconds(rules, num_replicas, lengths, costs, step) for step in steps]
    return sum(seconds) / len(seconds) + costs.train_seconds + costs.transfer_seconds


def _draw_seconds(rules: ScheduleConfig, num_replicas: int, lengths: Lengths, costs: Costs, step: int) -> float:
    """Seconds until the slowest replica has finished its chunk of batch `step`."""
    requests = rules.requests_of(step)
    smaller, num_larger = divmod(rules.batch_rows, num_replicas)
    slowest, start = 0.0, requests.start
    for replica in range(num_replicas):
        stop = start + smaller + (replica < num_larger)
        chunk = {request: lengths(request, 0) for request in range(start, stop)}
        slowest = max(slowest, costs.slice_seconds(draw(chunk, None, rules.max_running).stretches))
        start = stop
    return slowest + costs.overhead_seconds


def optimum(rules: ScheduleConfig, num_replicas: int, lengths: Lengths, costs: Costs) -> float:
    """A lower bound of an asynchronous run's mean seconds per step: what the busier side needs if it never waits.

    The rollout side generates all tokens at the best rate that an engine reaches with as many running requests as
    `ahead` and `max_running` allow. Failures, swaps and prefills are left out; they only add to it.
    """
    steps = range(rules.first_step, rules.num_steps_total + 1)
    num_tokens = sum(lengths(request, 0) for step in steps for request in rules.requests_of(step)) / len(steps)
    most = min(rules.max_running, -(-(rules.ahead + 1) * rules.batch_rows // num_replicas))
    token_seconds = min(costs.step_seconds(running) / running for running in range(1, most + 1))
    return max(costs.train_seconds + costs.exposed_seconds, num_tokens * token_seconds / num_replicas)
