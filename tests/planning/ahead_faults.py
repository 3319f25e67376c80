"""Faults of generation that runs ahead, and of router replay, for the catalogue."""

from __future__ import annotations

from fault import ACTOR, CORRECTION, ROLLOUT, values

AHEAD, PARTIAL = "trainer.rollout_ahead", "async_training.partial_rollout"
SYNC = "async_training.trigger_parameter_sync_step"
IS = f"{CORRECTION}.rollout_is"
RUNS_AHEAD = f"correction placement save batch trainer.test_freq {AHEAD} {SYNC}"
values("ahead in one pool", RUNS_AHEAD, {AHEAD: 1, IS: "token"}, (AHEAD, "a pool of its own"))
values("stale", RUNS_AHEAD, {AHEAD: 1, PARTIAL: True}, (IS, "must be token or sequence"))
values("rare weights", RUNS_AHEAD, {SYNC: 2}, (AHEAD, "must be >= "))
SHARED = {AHEAD: 1, SYNC: 2, PARTIAL: True, IS: "token"}
values("rare weights of one pool", RUNS_AHEAD, SHARED, (SYNC, "must be 1 where"))

# Late groups
RATE = f"{ROLLOUT}.over_sample_rate"
LATE = {AHEAD: 1, PARTIAL: True, IS: "token", RATE: 0.2}
values("late without a bound", f"{RUNS_AHEAD} {RATE}", {RATE: 0.2}, (RATE, "the steps that a group may be late"))
POLICY = "async_training.straggler_policy"
CUT = LATE | {POLICY: "truncate"}
values("late and cut", f"{RUNS_AHEAD} {RATE} {POLICY}", CUT, (POLICY, "must be wait with over_sample_rate"))

# Experts that are replayed
MODE, FREQ = f"{ACTOR}.router_replay.mode", f"{ACTOR}.router_replay.compare_freq"
RETURNS = f"{ROLLOUT}.enable_rollout_routing_replay"
REPLAYS = f"layout {MODE} {FREQ}"
values("replay of a dense model", REPLAYS, {MODE: "R2"}, (MODE, "must be disabled"), experts=False)
DENSE = ((MODE, "has no experts"), (RETURNS, "has no experts"))
values("the engine's of a dense model", REPLAYS, {MODE: "R3", RETURNS: True, FREQ: 2}, *DENSE, experts=False)
values("a pass that there is", REPLAYS, {MODE: "R2", FREQ: 3}, (FREQ, "must be 0"), experts=True)
NO_PASS = {f"{CORRECTION}.bypass_mode": True, MODE: "R2"}
values("replay of no pass", f"{REPLAYS} correction", NO_PASS, (MODE, "bypass_mode"), experts=True)
