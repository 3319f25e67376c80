"""Running ahead on real replicas and the real driver, with roles that sleep: against its bounds and synchronous steps.

What else a machine does can only make a run longer, so that the quickest round counts and the bounds have no slack; a
round is only repeated where it missed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

import pytest
from async_step import Figures, Shape, measure, shapes, sleeping_cluster

from megatron_rl.cluster.process_cluster import ProcessCluster

MOST_ROUNDS = 3
MOST_BEHIND = 1.1
"""Running ahead to all ranks in turns, in seconds of a step, where answers are short and equal: nobody has anything to
wait for in either, and what differs is the controller and the transfers."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with sleeping_cluster() as cluster:
        yield cluster


def quickest(cluster: ProcessCluster, shape: Shape, turns: bool, holds: Callable[[Figures], bool]) -> Figures:
    """Figures of as many rounds as it takes until `holds` does."""
    found = Figures([], [], [], [])
    for _ in range(MOST_ROUNDS):
        one = measure(cluster, shape, 1, 1, turns)
        for name in ("ahead", "all_ranks", "in_turns", "sending"):
            getattr(found, name).extend(getattr(one, name))
        if holds(found):
            break
    return found


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.quiet
@pytest.mark.timeout(240)
def test_long_tailed_answers_hardly_hold_the_trainer_up(cluster: ProcessCluster) -> None:
    """At most 1.10 of the optimum, and 1.8 times as fast as all ranks that generate and then train.

    Would not catch costs of real engines, nor a controller that is slow only with many replicas.
    """
    shape = shapes(9)[0]
    found = quickest(cluster, shape, False, lambda one: min(one.ahead) <= 1.10 * shape.optimum_s)
    assert min(found.ahead) <= 1.10 * shape.optimum_s
    assert min(found.all_ranks) >= 1.8 * min(found.ahead)


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.quiet
@pytest.mark.timeout(240)
def test_short_equal_answers_are_not_slower_ahead(cluster: ProcessCluster) -> None:
    """Than the same split in turns, and to within a tenth than all ranks together, which have nothing to lose there.

    Would not catch slices far longer than a training step.
    """
    shape = shapes(10)[1]
    found = quickest(cluster, shape, True, lambda one: min(one.ahead) <= MOST_BEHIND * min(one.all_ranks))
    assert min(found.ahead) <= min(found.in_turns)
    assert min(found.ahead) <= MOST_BEHIND * min(found.all_ranks)


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.quiet
@pytest.mark.timeout(400)
def test_medians_of_the_whole_bench(cluster: ProcessCluster) -> None:
    """The same bounds for medians of three rounds and longer runs, on a machine that does nothing else. Would not catch
    a spread that is wide for other reasons.
    """
    tailed, equal = shapes(13)
    found = measure(cluster, tailed, 3, 2, turns=False)
    assert median(found.ahead) <= 1.10 * tailed.optimum_s and median(found.all_ranks) >= 1.8 * median(found.ahead)
    found = measure(cluster, equal, 3, 2)
    assert median(found.ahead) <= min(median(found.in_turns), MOST_BEHIND * median(found.all_ranks))
