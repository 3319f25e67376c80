"""Settings of verl's asynchronous trainers, translated to `trainer.rollout_ahead` and `async_training`.

The fully asynchronous trainer counts in samples and transfers where this program counts in steps: a training step takes
`require_batches` mini-batches, `rollout.*` says how many ranks generate and how many prompts are generated for in all,
and `staleness_threshold` is the share of samples that may be older than the last transfer.

The V1 trainer (`trainer.v1`, verl 0.9) keeps `num_warmup_batches` batches in generation beyond the one that is trained,
trains groups as they finish, and drops or awaits those that are older than `sampler.max_off_policy_threshold` versions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_rl.config.verl_compat.key_rows import Differs, Outcome

GROUP, V1 = "async_training", "trainer.v1"
CORRECTION = "algorithm.rollout_correction"
AHEAD, PARTIAL = "trainer.rollout_ahead", f"{GROUP}.partial_rollout"
TRAIN_BATCH, MINI_BATCH = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
SYNC, COLOCATE, SEPARATE = "sync", "colocate_async", "separate_async"
ONE_VERSION = "all responses of a synchronous step are sampled with one version of the weights"
BY_STALENESS = "async_training.staleness_threshold bounds the staleness"


def trainer_mode(given: Mapping[str, Any]) -> str:
    """The mode of verl's V1 trainer: sync where nothing is set or the older trainer is asked for."""
    mode = given.get(f"{V1}.trainer_mode")
    return SYNC if mode is None or given.get("trainer.use_v1") is False else str(mode)


def is_asynchronous(given: Mapping[str, Any]) -> bool:
    """Return True for settings of an asynchronous trainer of verl."""
    has_group = any(key.startswith(f"{GROUP}.") for key in given)
    return has_group or "rollout.total_rollout_steps" in given or trainer_mode(given) != SYNC


def batch_of_prompts(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """A batch of 0 prompts: a step has as many as an asynchronous trainer fetches for it."""
    return {key: _step_prompts(given)} if is_asynchronous(given) else {key: value}


def drawn_one_by_one(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """Prompts that the loader hands out at once: asynchronous trainers, and slices here, take them one by one."""
    return "requests are handed out one by one in slices" if is_asynchronous(given) else {key: value}


def steps_of_prompts(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """Prompts of the whole run -> steps."""
    return {target: max(1, value // _step_prompts(given))} if isinstance(value, int) else {target: value}


def transfers_to_steps(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """Transfers of weights from one validation to the next -> steps."""
    if not isinstance(value, int) or value < 1:
        return {target: value}
    return {target: value * _every(given)}


def steps_ahead(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """The share of stale samples -> the age of the oldest: those between two transfers, and of the share before."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return {AHEAD: value}
    every = _every(given)
    settings = {AHEAD: every - 1 + math.ceil(value * every)}
    # verl's default: the rollout's log-probs are the old ones.
    asked = (f"{GROUP}.use_rollout_log_probs", f"{GROUP}.compute_prox_log_prob", f"{CORRECTION}.rollout_is")
    return settings if any(other in given for other in asked) else settings | {f"{CORRECTION}.bypass_mode": True}


def behaviour_as_old(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """Unless the trainer's are computed as well, the rollout's log-probs are the old ones."""
    if given.get(f"{GROUP}.compute_prox_log_prob") is True:
        return "compute_prox_log_prob takes the trainer's log-probs for the proximal policy, as is usual here"
    return {target: value}


def asynchronous(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """The V1 trainer's mode. separate_async: the rollout has ranks of its own. colocate_async: it has the actor's.

    In both, unfinished responses continue under new weights. None for a mode that is not verl's.
    """
    mode = trainer_mode(given)
    if mode == SYNC:
        return "trainer.use_v1=false asks for verl's older trainer, which is synchronous"
    if mode not in (COLOCATE, SEPARATE):
        return None
    settings: dict[str, Any] = {"actor_rollout_ref.hybrid_engine": False} if mode == SEPARATE else {}
    if mode == COLOCATE or PARTIAL not in given:
        settings[PARTIAL] = True
    if f"{GROUP}.staleness_threshold" in given:
        return settings
    ahead = _batches_ahead(given)
    return settings | {AHEAD: ahead} | (_corrected(given) if ahead else {})


def batches_ahead(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """Batches in generation before the first step. They stay ahead, so they are steps ahead; a part counts as one."""
    if (reason := _of_another_mode(key, given)) is not None:
        return reason
    is_count = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    return {AHEAD: _batches_ahead(given)} if is_count else None


def oldest_version(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """Versions of the weights from a prompt's first token to its training -> the bound on steps ahead.

    A prompt that is trained in the step of its own batch counts as 1 in verl, and as 0 steps ahead here.
    """
    if trainer_mode(given) == SYNC:
        return ONE_VERSION
    if f"{GROUP}.staleness_threshold" in given:
        return BY_STALENESS
    return {AHEAD: _batches_ahead(given)} if value is None or is_count(value) else None


def stale_groups(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """The choice for groups that are too old: wait for them, or drop them and generate others."""
    if trainer_mode(given) == SYNC:
        return ONE_VERSION
    if value == "wait":
        return {f"{GROUP}.straggler_policy": "wait"}
    if value != "drop":
        return None
    return Differs(
        f"a step waits for the responses to its own prompts, at most {AHEAD} steps old, and drops none; verl trains "
        "the groups that finish first and generates others for those that are too old"
    )


def mini_batches_per_transfer(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """Optimizer steps from one transfer of weights to the next, which verl 0.9 asks to be those of one batch.

    None if they are not: verl refuses that, too.
    """
    if (reason := _of_another_mode(key, given)) is not None:
        return reason
    prompts = given.get(TRAIN_BATCH, 1024)
    if is_count(value) and prompts in (0, value * number(given, MINI_BATCH, 256)):
        return (
            f"weights are transferred after every step, whose optimizer steps are {TRAIN_BATCH} / ppo_mini_batch_size"
        )
    return None


def repeatable(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """A rollout that generates the same in every run: in an asynchronous run it takes a schedule that is computed."""
    if is_asynchronous(given):
        return {f"{GROUP}.deterministic": value}
    return "every response has a seed of its own, and the replica that generates it does not depend on time"


def _of_another_mode(key: str, given: Mapping[str, Any]) -> str | None:
    """Why a setting of `trainer.v1.MODE` changes nothing; None if it counts."""
    mode = key.removeprefix(f"{V1}.").partition(".")[0]
    if mode != trainer_mode(given):
        return f"it counts with {V1}.trainer_mode={mode} alone"
    return BY_STALENESS if f"{GROUP}.staleness_threshold" in given else None


def _batches_ahead(given: Mapping[str, Any]) -> int:
    """Steps that the V1 trainer's prompts are handed out in advance: its batches in generation, within the bound
    on versions. verl's defaults are 1 and 8.
    """
    batches = given.get(f"{V1}.{trainer_mode(given)}.num_warmup_batches", 1)
    most = given.get(f"{V1}.sampler.max_off_policy_threshold", 8)
    ahead = math.ceil(batches) if isinstance(batches, int | float) and batches >= 0 else 1
    return min(ahead, most - 1) if is_count(most) else ahead


def _corrected(given: Mapping[str, Any]) -> dict[str, Any]:
    """Weights for stale tokens, unless something corrects for them."""
    corrects = (f"{CORRECTION}.{name}" for name in ("rollout_is", "rollout_rs", "bypass_mode"))
    return {} if any(given.get(name) for name in corrects) else {f"{CORRECTION}.rollout_is": "token"}


def _step_prompts(given: Mapping[str, Any]) -> int:
    if trainer_mode(given) == SEPARATE:
        mini_batches = number(given, f"{V1}.{SEPARATE}.parameter_sync_step", 4)
    else:
        mini_batches = number(given, f"{GROUP}.require_batches", 1)
    return mini_batches * number(given, MINI_BATCH, 256)


def _every(given: Mapping[str, Any]) -> int:
    return number(given, f"{GROUP}.trigger_parameter_sync_step", 1)


def is_count(value: Any) -> bool:
    """Return True for a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def number(given: Mapping[str, Any], key: str, default: int) -> int:
    """A count among the settings; the default where it is missing or none."""
    value = given.get(key, default)
    return value if isinstance(value, int) and value >= 1 else default
