"""What many ranks cost the driver grows as their number, in counts and in ratios of CPU seconds."""

from __future__ import annotations

import pytest
from scale import exponent, exponents, one_size

BYTES = ("noop_bytes", "rows_bytes")


def test_an_exponent_is_the_slope_of_the_logarithms() -> None:
    """By hand. Would not catch a curve that bends."""
    assert exponent([2, 4, 8], [3, 12, 48]) == pytest.approx(2)
    assert exponents([{"ranks": 2, "a": 5.0}, {"ranks": 20, "a": 50.0}], ("a",)) == {"a": pytest.approx(1)}


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_ranks_start_answer_lose_one_are_repaired_and_end() -> None:
    """A rank imports nothing of its own, and each gets its own part alone. Would not catch what only hundreds show."""
    found = [one_size(num_ranks, rounds=5, listen_s=1.0) for num_ranks in (8, 48)]
    assert max(exponents(found, BYTES).values()) < 1.1
    assert found[1]["ranks_cpu_s"] / 48 < found[1]["supervisor_cpu_s"] / 25
    assert found[1]["driver_mib"] < 1.1 * found[0]["driver_mib"]
