"""What many ranks cost the driver grows as their number, in counts and in ratios of CPU seconds."""

from __future__ import annotations

import statistics
import sys
import time

import pytest
from controller import NoOpWorker, measure, noop_arms
from scale import exponent, exponents, one_size
from scale_flood import TOKENS, flood, instant_episodes
from scale_held import one_size as one_held_size

from megatron_rl.agents.episode import Episode
from megatron_rl.records import Sampling

BYTES = ("noop_bytes", "rows_bytes")


def test_an_exponent_is_the_slope_of_the_logarithms() -> None:
    """By hand. Would not catch a curve that bends."""
    assert exponent([2, 4, 8], [3, 12, 48]) == pytest.approx(2)
    assert exponents([{"ranks": 2, "a": 5.0}, {"ranks": 20, "a": 50.0}], ("a",)) == {"a": pytest.approx(1)}


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_ranks_start_answer_lose_one_are_repaired_and_end() -> None:
    """A rank imports nothing of its own, gets its own part alone, and has no thread of the driver. Would not catch what
    only hundreds show.
    """
    found = [one_size(num_ranks, rounds=5, listen_s=1.0) for num_ranks in (8, 48)]
    assert max(exponents(found, BYTES).values()) < 1.1
    assert found[1]["ranks_cpu_s"] / 48 < found[1]["supervisor_cpu_s"] / 25
    assert found[1]["threads"] == found[0]["threads"]
    assert found[1]["driver_mib"] < 1.1 * found[0]["driver_mib"]


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_column_that_stays_with_ranks_costs_messages_as_many_bytes_as_there_are_ranks() -> None:
    """Its rows are dealt out anew, and each rank is told of its own alone. Would not catch what other nodes copy."""
    found = [one_held_size(num_ranks, rounds=2) for num_ranks in (4, 24)]
    assert max(exponents(found, ("make_bytes", "read_bytes")).values()) < 1.1


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.quiet
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_ranks", "most"), [(2, 0.8), (16, 0.8)])
def test_a_call_of_all_ranks_costs_less_than_bare_calls_of_ray(num_ranks: int, most: float) -> None:
    """Medians of 80 calls that do nothing, arms in turns. Would not catch what a second machine costs."""
    seconds = measure(num_ranks, 80, NoOpWorker, noop_arms)
    ratio = statistics.median(seconds["ray"]) / statistics.median(seconds["bare"])
    print(f"{num_ranks} ranks: {ratio:.2f} of bare calls")
    assert ratio < most


@pytest.mark.slow
@pytest.mark.parametrize("share_away", [0.0, 0.9], ids=["few open", "most open"])
def test_a_flood_of_episodes_costs_the_driver_as_many_lines_and_calls_as_it_has_turns(share_away: float) -> None:
    """Python calls are counted. Would not catch what is superlinear inside one call."""
    found = []
    for num in (50, 200):
        calls = [0]

        def count(frame: object, event: str, argument: object, calls: list[int] = calls) -> None:
            calls[0] += 1

        sys.setprofile(count)
        try:
            found.append(flood(num, 4, int(share_away * num)) | {"calls": calls[0]})
        finally:
            sys.setprofile(None)
    assert found[1]["lines"] < 1.3 * found[1]["turns"]
    assert max(exponents(found, ("journal_bytes", "calls", "lines"), over="episodes").values()) < 1.1


def test_an_episode_that_ends_costs_the_same_however_many_are_open() -> None:
    """A ratio of CPU seconds, 1 where it is right and 8 where each looks at all. Would not catch a slow constant."""
    spent = []
    for num in (500, 4000):
        episodes = instant_episodes(num_turns=2, num_away=num)
        task = Episode((1,), {"index": 0, "sample": 0}, Sampling(1.0, 1.0, -1, 8, salt=1))
        task.extend(TOKENS, version=0, has_turns=True)
        for number in range(num):
            episodes.submit(number, task)
        start = time.process_time()
        for number in range(num):
            episodes.forget(number)
        spent.append((time.process_time() - start) / num)
        assert not episodes.is_open
    assert spent[1] < 4 * spent[0]
