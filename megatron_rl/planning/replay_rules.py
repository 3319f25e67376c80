"""Rules of `actor.router_replay`, and of experts that the rollout engine returns."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.config.keys import ACTOR, ROLLOUT
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.model.families import ModelShape

MODE, FREQ = f"{ACTOR}.router_replay.mode", f"{ACTOR}.router_replay.compare_freq"
RETURNS = f"{ROLLOUT}.enable_rollout_routing_replay"
OFF, RECORDED, ENGINES = "disabled", "R2", "R3"
LARGE = 1 << 30
"""Bytes of a step's experts from which a plan has a note."""


def replay_problems(config: RunConfig) -> Iterable[Violation]:
    """Every violation. A constraint reports an unknown mode."""
    replay = config.actor_rollout_ref.actor.router_replay
    if replay.compare_freq > 0 and replay.mode in (OFF, RECORDED):
        rule = f"must be 0 without {MODE}={ENGINES}: the pass for old log-probs is one without replay"
        yield Violation({FREQ: replay.compare_freq}, rule, {FREQ: 0})


def replay_notes(config: RunConfig, shape: ModelShape) -> list[str]:
    """A note on the size of the experts that travel with the tokens of a step, if it is large."""
    shared = config.actor_rollout_ref
    if shape.num_experts == 0 or not (config.returns_experts or shared.actor.router_replay.mode == RECORDED):
        return []
    per_token = shape.num_routed_layers * shape.experts_per_token * (1 if shape.num_experts <= 256 else 2)
    total = config.batch_sizes.num_samples * config.longest_sequence * per_token
    if total < LARGE:
        return []
    passed = config.trainer.held_bytes is None
    where = "the controller's memory" if passed else "its nodes' shared memory (/dev/shm)"
    return [
        f"note: the experts of a step's samples take up to {total / 1e9:.1f} GB of {where}, {per_token} bytes for each "
        "token; no rank keeps them on its device"
    ]
