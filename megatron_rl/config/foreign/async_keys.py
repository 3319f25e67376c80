"""Settings of verl's asynchronous trainer, which counts in samples and transfers what is in steps here.

There a training step takes `require_batches` mini-batches, `rollout.*` says how many ranks generate and how many
prompts are answered in all, and `staleness_threshold` is the share of samples that may be older than the last transfer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

GROUP = "async_training"
CORRECTION = "algorithm.rollout_correction"


def is_asynchronous(given: Mapping[str, Any]) -> bool:
    """Whether the settings are of verl's asynchronous trainer."""
    return any(key.startswith(f"{GROUP}.") for key in given) or "rollout.total_rollout_steps" in given


def batch_of_prompts(key: str, target: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any] | str:
    """Prompts of a step: what the trainer fetches for one."""
    return {key: _step_prompts(given)} if is_asynchronous(given) else {key: value}


def drawn_one_by_one(key: str, target: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any] | str:
    """Prompts are handed out one by one there, and here too, in slices."""
    return "requests are handed out one by one in slices" if is_asynchronous(given) else {key: value}


def steps_of_prompts(key: str, target: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any] | str:
    """Prompts of the whole run -> steps."""
    return {target: max(1, value // _step_prompts(given))} if isinstance(value, int) else {target: value}


def transfers_to_steps(key: str, target: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any] | str:
    """Validations are counted in transfers of weights there."""
    if not isinstance(value, int) or value < 1:
        return {target: value}
    return {target: value * _every(given)}


def steps_ahead(key: str, target: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any] | str:
    """The share of stale samples -> the age of the oldest: those between two transfers, and of the share before."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return {"trainer.rollout_ahead": value}
    every = _every(given)
    said = {"trainer.rollout_ahead": every - 1 + math.ceil(value * every)}
    # verl's default: the rollout's log-probs are the old ones.
    asked = (f"{GROUP}.use_rollout_log_probs", f"{GROUP}.compute_prox_log_prob", f"{CORRECTION}.rollout_is")
    return said if any(other in given for other in asked) else said | {f"{CORRECTION}.bypass_mode": True}


def behaviour_as_old(key: str, target: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any] | str:
    """Unless the trainer's are computed as well, the rollout's log-probs are the old ones."""
    if given.get(f"{GROUP}.compute_prox_log_prob") is True:
        return "compute_prox_log_prob takes the trainer's log-probs for the proximal policy, as is usual here"
    return {target: value}


def separate(key: str, target: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any] | str:
    """The rollout on ranks of its own, which generate the next batch while one is trained; or on the actor's own, where
    unfinished answers go on with the next batch.
    """
    if value == "colocate_async":
        return {"trainer.rollout_ahead": 1, "async_training.partial_rollout": True} | _corrected(given)
    said: dict[str, Any] = {"actor_rollout_ref.hybrid_engine": False}
    if f"{GROUP}.staleness_threshold" in given:
        return said
    return said | {"trainer.rollout_ahead": 1} | _corrected(given)


def _corrected(given: Mapping[str, Any]) -> dict[str, Any]:
    """Weights for stale tokens, unless something corrects for them."""
    corrects = (f"{CORRECTION}.{name}" for name in ("rollout_is", "rollout_rs", "bypass_mode"))
    return {} if any(given.get(name) for name in corrects) else {f"{CORRECTION}.rollout_is": "token"}


def _step_prompts(given: Mapping[str, Any]) -> int:
    fetched = number(given, f"{GROUP}.require_batches", 1)
    return fetched * number(given, "actor_rollout_ref.actor.ppo_mini_batch_size", 256)


def _every(given: Mapping[str, Any]) -> int:
    return number(given, f"{GROUP}.trigger_parameter_sync_step", 1)


def number(given: Mapping[str, Any], key: str, default: int) -> int:
    """A count among the settings; the default where it is missing or none."""
    value = given.get(key, default)
    return value if isinstance(value, int) and value >= 1 else default
