"""How long micro-batches take through pipeline stages: in closed form, and by simulating every pass.

    one forward, one backward    m micro-batches through p stages of seconds F_s: m max(F) + sum(F) - max(F)
    interleaved, v chunks        what is not m max(F), filling and draining, takes 1 / v of that
(Narayanan et al., arXiv:2104.04473.) The simulation is what the closed form is held to.
"""

from __future__ import annotations

from collections.abc import Sequence


def pipeline_seconds(total: float, slowest: float, num_micro_batches: int, vpp_size: int = 1) -> float:
    """Seconds of all passes. total, slowest: of one micro-batch, forward and backward, through all stages and through
    the slowest of them.
    """
    return num_micro_batches * slowest + (total - slowest) / vpp_size


def simulated_seconds(forward: Sequence[float], backward: Sequence[float], num_micro_batches: int) -> float:
    """The same pass by pass, of one forward, one backward without chunks. forward, backward: seconds of each stage.

    A stage runs min(p - s - 1, m) forward passes first, then one of each in turn, then the backward passes left.
    """
    pp_size = len(forward)
    orders = [_order(pp_size - stage - 1, num_micro_batches) for stage in range(pp_size)]
    done: dict[tuple[str, int, int], float] = {}
    free, place = [0.0] * pp_size, [0] * pp_size
    while any(place[stage] < len(orders[stage]) for stage in range(pp_size)):
        for stage in range(pp_size):
            while place[stage] < len(orders[stage]):
                kind, number = orders[stage][place[stage]]
                is_forward = kind == "forward"
                neighbour = stage - 1 if is_forward else stage + 1
                ready: float | None = 0.0
                if 0 <= neighbour < pp_size:
                    ready = done.get((kind, neighbour, number))
                if ready is None:
                    break
                free[stage] = max(free[stage], ready) + (forward if is_forward else backward)[stage]
                done[kind, stage, number] = free[stage]
                place[stage] += 1
    return max(free)


def _order(num_first: int, num_micro_batches: int) -> list[tuple[str, int]]:
    """A stage's passes, as Megatron's schedule without interleaving runs them."""
    num_first = min(num_first, num_micro_batches)
    found = [("forward", number) for number in range(num_first)]
    for number in range(num_micro_batches - num_first):
        found += [("forward", num_first + number), ("backward", number)]
    return found + [("backward", number) for number in range(num_micro_batches - num_first, num_micro_batches)]
