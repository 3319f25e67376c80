"""Means over the updates that were taken, the count of the others, and when there are too many of them."""

from __future__ import annotations

import json
import math

import pytest

from megatron_rl.errors import NonFiniteUpdates
from megatron_rl.observe.updates import SkippedUpdates, update_means


def update(loss: float, skipped: bool = False, empty: bool = False) -> dict[str, float]:
    counts = {"actor/skipped_updates": float(skipped), "actor/empty_updates": float(empty)}
    return {"actor/pg_loss": loss, **counts}


def test_means_are_over_updates_taken():
    """(1 + 4) / 2, beside a NaN and an empty one. Would not catch a NaN of an update that was taken."""
    updates = [update(1.0), update(math.nan, skipped=True), update(0.0, empty=True), update(4.0)]
    assert update_means("actor", iter(updates)) == {
        "actor/pg_loss": 2.5,
        "actor/skipped_updates": 1.0,
        "actor/empty_updates": 1.0,
    }


def test_nothing_taken_is_no_mean():
    """Would not catch a logger that needs every metric at every step."""
    skipped = update(math.nan, skipped=True)
    assert update_means("actor", [skipped, skipped]) == {"actor/skipped_updates": 2.0, "actor/empty_updates": 0.0}


@pytest.mark.parametrize("most", [0, 2])
def test_one_too_many_in_a_row_ends_the_run(most):
    """A good update starts anew, an empty one does not, another role counts for itself, and a resumed run goes on.

    Would not catch a controller that takes no notice; `tests/e2e` does.
    """
    logger = SkippedUpdates(most)
    sick, critic = update(math.nan, skipped=True), {"critic/skipped_updates": 0.0, "critic/empty_updates": 0.0}
    for _ in range(most):
        logger.note("actor", sick)
    assert logger.note("actor", update(1.0)) == update(1.0)
    for _ in range(most):
        logger.note("actor", sick)
    logger.note("critic", critic)
    logger.note("actor", update(0.0, empty=True))
    resumed = SkippedUpdates(most)
    resumed.load_state_dict(json.loads(json.dumps(logger.state_dict())))
    assert resumed.totals == ({"actor": 2 * most} if most else {})
    with pytest.raises(NonFiniteUpdates, match=f"{most + 1} update.s. of the actor in a row .*pg_loss=nan"):
        resumed.note("actor", sick)
