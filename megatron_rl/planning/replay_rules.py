"""Rules of `actor.router_replay`, and of experts that the rollout engine returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megatron_rl.config.algorithms import bypasses
from megatron_rl.config.keys import ACTOR, CORRECTION, ROLLOUT
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.model.families import ModelShape
from megatron_rl.planning.model_folder import ModelSizes

MODE, FREQ = f"{ACTOR}.router_replay.mode", f"{ACTOR}.router_replay.compare_freq"
RETURNS = f"{ROLLOUT}.enable_rollout_routing_replay"
OFF, RECORDED, ENGINES = "disabled", "R2", "R3"
LARGE = 1 << 30
"""Bytes of a step's experts from which a plan has a note."""


def replay_problems(config: RunConfig, models: Sequence[ModelSizes]) -> Iterable[Violation]:
    """Every violation. A constraint reports an unknown mode."""
    replay, shared = config.actor_rollout_ref.actor.router_replay, config.actor_rollout_ref
    returns = shared.rollout.enable_rollout_routing_replay
    actor = next((model for model in models if model.path == shared.model.path), None)
    if replay.compare_freq > 0 and replay.mode in (OFF, RECORDED):
        rule = f"must be 0 without {MODE}={ENGINES}: the pass for old log-probs is one without replay"
        yield Violation({FREQ: replay.compare_freq}, rule, {FREQ: 0})
    if actor is not None and actor.num_experts == 0:
        why = f"{actor.path} has no experts"
        if replay.mode in (RECORDED, ENGINES):
            yield Violation({MODE: replay.mode}, f"must be {OFF}: {why}", _without(config))
        if returns:
            yield Violation({RETURNS: True}, f"must be false: {why}", {RETURNS: False})
        return
    if actor is not None and (why := actor.attention.unreplayable.get(config.trainer.device, "")):
        if replay.mode == ENGINES:
            yield Violation({MODE: ENGINES}, f"must be {OFF} or {RECORDED}: {why}", _without(config, RECORDED))
        if returns:
            yield Violation({RETURNS: True}, f"must be false: {why}", {RETURNS: False})
    if replay.mode == RECORDED and bypasses(config):
        rule = f"must be {OFF} or {ENGINES} with {CORRECTION}.bypass_mode=true: no pass makes old log-probs"
        yield Violation({MODE: RECORDED}, rule, {MODE: ENGINES})


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


def _without(config: RunConfig, mode: str = OFF) -> dict[str, Any]:
    """Settings of another mode than R3, without comparisons, which need R3."""
    compares = config.actor_rollout_ref.actor.router_replay.compare_freq > 0
    return {MODE: mode} | ({FREQ: 0} if compares else {})
