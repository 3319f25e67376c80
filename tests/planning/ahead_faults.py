"""Faults of generation that runs ahead, and of router replay, for the catalogue."""

from __future__ import annotations

from fault import ACTOR, values

AHEAD = "trainer.rollout_ahead"
SYNC = "async_training.trigger_parameter_sync_step"
RUNS_AHEAD = f"correction placement save batch trainer.test_freq {AHEAD} {SYNC}"
values("rare weights", RUNS_AHEAD, {SYNC: 2}, (AHEAD, "must be >= "))
# Experts that are replayed
MODE, FREQ = f"{ACTOR}.router_replay.mode", f"{ACTOR}.router_replay.compare_freq"
REPLAYS = f"layout {MODE} {FREQ}"
values("a pass that there is", REPLAYS, {MODE: "R2", FREQ: 3}, (FREQ, "must be 0"), experts=True)
