"""A model of one replica's engine: which requests get tokens in a slice, and how many seconds that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from megatron_rl.sampling.schedule_types import SliceOrder


@dataclass(frozen=True)
class Costs:
    """Seconds of each part. step_seconds: number of running requests -> one engine step. train_seconds: a training
    step.

    transfer_seconds: from the end of a training step until all replicas have its weights; the trainer is blocked for
    `exposed_seconds` of them. swap_seconds: what taking new weights adds to a slice. prefill_seconds: per earlier token
    of a restarted request. overhead_seconds: orders and reports of a slice.
    """

    step_seconds: Callable[[int], float]
    train_seconds: float
    transfer_seconds: float = 0.0
    exposed_seconds: float = 0.0
    swap_seconds: float = 0.0
    prefill_seconds: float = 0.0
    overhead_seconds: float = 0.0

    def slice_seconds(self, stretches: Iterable[tuple[int, int]]) -> float:
        """Seconds of engine steps. stretches: (number of steps, running requests in each)."""
        return sum(num_steps * self.step_seconds(running) for num_steps, running in stretches)


@dataclass(frozen=True)
class Drawing:
    """Result of one slice. drawn: request -> number of new tokens. stretches: (number of steps, running requests)."""

    num_steps: int
    drawn: dict[int, int]
    finished: list[int]
    stretches: list[tuple[int, int]]


def draw(remaining: dict[int, int], num_steps: int | None, max_running: int) -> Drawing:
    """Run a slice: one token a step for the first `max_running` requests; others follow, in order, as those finish.

    remaining: request -> tokens until it finishes, at least 1. num_steps None: until all have finished.
    """
    waiting = list(remaining)[::-1]
    begun: dict[int, int] = {}
    ends: list[tuple[int, int]] = []
    drawn: dict[int, int] = {}
    stretches: list[tuple[int, int]] = []
    now = 0
    while (waiting or ends) and (num_steps is None or now < num_steps):
        while waiting and len(ends) < max_running:
            request = waiting.pop()
            begun[request] = now
            heappush(ends, (now + remaining[request], request))
        stop = ends[0][0] if num_steps is None else min(ends[0][0], num_steps)
        stretches.append((stop - now, len(ends)))
        now = stop
        while ends and ends[0][0] == now:
            _, request = heappop(ends)
            drawn[request] = remaining[request]
    finished = sorted(drawn)
    drawn |= {request: now - begun[request] for _, request in ends if now > begun[request]}
    return Drawing(now, drawn, finished, stretches)


class Engine:
    """One engine: its requests, its version, and the version in its second buffer, None while that is written."""

    def __init__(self, version: int) -> None:
        """No requests, weights of `version`."""
        self.version = version
        self.received: int | None = None
        self.requests: set[int] = set()

    def follow(self, order: SliceOrder, releases: bool) -> bool:
        """Drop, start and swap as ordered; returns whether weights were swapped. releases: a swap empties the engine.

        Raises ValueError for an order that a real engine could not carry out.
        """
        swaps = order.version != self.version
        if swaps and releases:
            self.requests.clear()
        if swaps and order.version != self.received:
            raise ValueError(f"{order} asks for other weights than {self.version} and those received, {self.received}")
        if not self.requests.issuperset(order.drops):
            raise ValueError(f"{order} drops requests that are not among {sorted(self.requests)}")
        self.requests.difference_update(order.drops)
        if not self.requests.isdisjoint(order.starts) or len(set(order.starts)) < len(order.starts):
            raise ValueError(f"{order} starts what runs already: {sorted(self.requests)}")
        self.requests.update(order.starts)
        self.version = order.version
        return swaps
