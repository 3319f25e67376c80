"""Metrics of optimizer steps: means over those that were taken, and counts of those that were not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_rl.errors import NonFiniteUpdates

NOT_TAKEN = ("skipped_updates", "empty_updates")
"""Metrics of an update, after "ROLE/": 1 where gradient or loss were not finite, or where no token counted; else 0."""


def update_means(role: str, updates: Iterable[dict[str, float]]) -> dict[str, float]:
    """The metrics of a step of `role`, from those of its updates, of which there must be one.

    Updates that were not taken are left out of the means: their metrics may be NaN or means over nothing. Where none
    was taken there are no means. The counts of NOT_TAKEN are sums.
    """
    collected = list(updates)
    counts = [f"{role}/{name}" for name in NOT_TAKEN]
    taken = [update for update in collected if not any(update[name] for name in counts)]
    means = {name: sum(update[name] for update in taken) / len(taken) for name in (taken[0] if taken else ())}
    return means | {name: sum(update[name] for update in collected) for name in counts}


class SkippedUpdates:
    """Counts the updates of each role that were skipped because they were not finite: in a row, and in all."""

    def __init__(self, max_in_a_row: int) -> None:
        """Allow `max_in_a_row` skipped updates to follow each other; 0: none."""
        self.max_in_a_row = max_in_a_row
        self.totals: dict[str, int] = {}
        self._in_a_row: dict[str, int] = {}

    def note(self, role: str, update: dict[str, float]) -> dict[str, float]:
        """Count one update, and return it. Raises NonFiniteUpdates when it is one too many in a row.

        An update without a token to learn from neither counts nor ends a row.
        """
        if update[f"{role}/skipped_updates"]:
            self.totals[role] = self.totals.get(role, 0) + 1
            self._in_a_row[role] = self._in_a_row.get(role, 0) + 1
        elif not update[f"{role}/empty_updates"]:
            self._in_a_row[role] = 0
        if self._in_a_row.get(role, 0) > self.max_in_a_row:
            measured = ", ".join(f"{name}={value:.4g}" for name, value in sorted(update.items()))
            raise NonFiniteUpdates(
                f"{self._in_a_row[role]} update(s) of the {role} in a row had a gradient or a loss that is not finite, "
                f"and were skipped; trainer.max_skipped_updates={self.max_in_a_row}. Its weights are those of its last "
                f"good update. The last one measured: {measured}"
            )
        return update

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, JSON-ready, for `load_state_dict`."""
        return {"totals": dict(self.totals), "in_a_row": dict(self._in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the counts of `state_dict`."""
        self.totals, self._in_a_row = dict(state["totals"]), dict(state["in_a_row"])
