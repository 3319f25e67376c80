"""Which cases `make test` goes through, which the sweeps have, and which run once a week.

A sweep proves each part once, in the layout that cuts it most. Further families with the same parts, and further
layouts of them, are weekly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

WEEKLY = (pytest.mark.exhaustive, pytest.mark.weekly)
"""Both marks, because `make test` leaves out what is exhaustive, and the sweeps what is weekly."""


def marks_of(case: object, often: Collection = (), weekly: Collection = ()) -> list[pytest.MarkDecorator]:
    """None for what `make test` has, and exhaustive for the rest. weekly: of the rest, what the sweeps leave out."""
    if case in often:
        return []
    return list(WEEKLY) if case in weekly else [pytest.mark.exhaustive]


def often(cases: Iterable[str], chosen: Collection[str], weekly: Collection[str] = ()) -> list:
    """Parameters: the chosen ones as they are, the others exhaustive, and of these some weekly."""
    return [pytest.param(case, marks=marks_of(case, chosen, weekly)) for case in cases]
