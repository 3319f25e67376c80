"""The critical path of tasks by hand, and the pipeline's closed form against a simulation of every pass."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.planning.critical_path import Task, simulate_tasks
from megatron_rl.planning.time import pipeline_seconds

SECONDS = st.floats(0.1, 10.0)


def simulated_seconds(forward: Sequence[float], backward: Sequence[float], num_micro_batches: int) -> float:
    """Simulate every pass of one forward, one backward, without chunks. forward, backward: seconds of each stage.

    Stage s of p runs min(p - s - 1, m) forward passes first, then one forward and one backward alternately, then the
    backward passes that are left.
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
    """Return the passes of one stage in the order of Megatron's schedule without interleaving."""
    num_first = min(num_first, num_micro_batches)
    order = [("forward", number) for number in range(num_first)]
    for number in range(num_micro_batches - num_first):
        order += [("forward", num_first + number), ("backward", number)]
    return order + [("backward", number) for number in range(num_micro_batches - num_first, num_micro_batches)]


def test_tasks_by_hand():
    """Two pools, one task on both: c waits for a's pool and for b. Would not catch tasks that could swap places."""
    tasks = [Task("a", 3, ("x",)), Task("b", 5, ("y",)), Task("c", 2, ("x", "y")), Task("d", 1, ("x",), ("b",))]
    found = simulate_tasks(tasks)
    assert {name: (bar.start, bar.stop) for name, bar in found.bars.items()} == {
        "a": (0, 3), "b": (0, 5), "c": (5, 7), "d": (7, 8),
    }  # fmt: skip
    assert found.total == 8 and found.critical_path == ["b", "c", "d"]
    assert simulate_tasks([]).total == 0.0 and simulate_tasks([]).critical_path == []


def test_an_unknown_predecessor_is_refused():
    """Would not catch a predecessor of the same name in another step."""
    with pytest.raises(KeyError):
        simulate_tasks([Task("a", 1, ("x",), ("b",))])


@given(st.integers(1, 8), st.integers(1, 24), SECONDS, SECONDS)
def test_even_stages_take_the_closed_form(pp_size, num_micro_batches, forward, backward):
    """(m + p - 1) (f + b). Would not catch a wrong number of micro-batches."""
    found = simulated_seconds([forward] * pp_size, [backward] * pp_size, num_micro_batches)
    assert found == pytest.approx((num_micro_batches + pp_size - 1) * (forward + backward))
    one = forward + backward
    assert pipeline_seconds(pp_size * one, one, num_micro_batches) == pytest.approx(found)
    chunked = pipeline_seconds(pp_size * one, one, num_micro_batches, 2)
    assert chunked == pytest.approx((num_micro_batches + (pp_size - 1) / 2) * one)


@given(st.integers(2, 8), st.integers(1, 24), SECONDS, st.floats(1.0, 3.0))
def test_a_heavier_last_stage_takes_the_closed_form(pp_size, num_micro_batches, forward, heavier):
    """As the head makes it. Would not catch traffic between stages."""
    stages = [forward] * (pp_size - 1) + [forward * heavier]
    backward = [2 * seconds for seconds in stages]
    slowest = 3 * forward * heavier
    closed = pipeline_seconds(3 * sum(stages), slowest, num_micro_batches)
    assert simulated_seconds(stages, backward, num_micro_batches) == pytest.approx(closed)


@given(st.lists(st.floats(0.8, 1.2), min_size=2, max_size=8), st.integers(1, 24))
def test_uneven_stages_never_take_longer(stages, num_micro_batches):
    """The closed form is an upper bound, within a seventh for stages 1.5 times apart; the busiest stage's own work is
    a lower one. Would not catch a schedule that hides more.
    """
    backward = [2 * seconds for seconds in stages]
    simulated = simulated_seconds(stages, backward, num_micro_batches)
    closed = pipeline_seconds(3 * sum(stages), 3 * max(stages), num_micro_batches)
    assert max(num_micro_batches * 3 * max(stages), 0.86 * closed) <= simulated * (1 + 1e-9)
    assert simulated <= closed * (1 + 1e-9)


def test_tasks_that_share_cores_slow_down_alike():
    """Two cores, by hand: a wants 2 and b 1, so both run at 2/3 until b is done after 3 s; a has 1 s left then. c comes
    after both. Would not catch tasks whose wants change while they run.
    """
    tasks = [Task("a", 3, ("x",), wants=2.0), Task("b", 2, ("y",), wants=1.0), Task("c", 1, ("x",), ("a", "b"), 1.0)]
    found = simulate_tasks(tasks, shared=2.0)
    assert {name: (bar.start, bar.stop) for name, bar in found.bars.items()} == {
        "a": (0, pytest.approx(4)), "b": (0, pytest.approx(3)), "c": (pytest.approx(4), pytest.approx(5)),
    }  # fmt: skip
    assert found.critical_path == ["a", "c"]
    assert simulate_tasks(tasks).total == 4 and simulate_tasks(tasks, shared=4.0).total == 4
    # Turns leave half: at 1/3 b is done after 6 s; a has 1 s left, which it runs alone.
    slowed = simulate_tasks(tasks, shared=2.0, turns_share=0.5)
    assert [slowed.bars[name].stop for name in "abc"] == pytest.approx([7.0, 6.0, 8.0])


@given(
    st.lists(st.tuples(SECONDS, st.integers(0, 2), st.floats(0.0, 3.0)), min_size=1, max_size=8), st.floats(0.5, 4.0)
)
def test_sharing_never_beats_the_work_nor_the_pools(drawn, shared):
    """At least as long as without sharing, and as all work over what there is; at most both added up. Would not catch
    a share that is given unevenly.
    """
    tasks = [
        Task(str(number), seconds, (str(pool),), wants=min(wants, shared))
        for number, (seconds, pool, wants) in enumerate(drawn)
    ]
    alone, found = simulate_tasks(tasks).total, simulate_tasks(tasks, shared).total
    work = sum(task.seconds * task.wants for task in tasks) / shared
    assert max(alone, work) - 1e-6 <= found <= alone + work + 1e-6
