"""Rules of `algorithm.rollout_correction`: valid thresholds, and what goes with `bypass_mode`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_rl.config.algorithms import estimator_traits
from megatron_rl.config.correction import (
    CRITERIA,
    DIVERGENCE_CRITERIA,
    RATIO_CRITERIA,
    RolloutCorrectionConfig,
    criteria,
    criteria_names,
    importance_bounds,
)
from megatron_rl.config.declarations import POLICY_LOSSES
from megatron_rl.config.keys import ACTOR, CORRECTION
from megatron_rl.config.problems import nearest_name
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation

EXAMPLES = {**dict.fromkeys(CRITERIA, "0.5_2.0"), **dict.fromkeys(DIVERGENCE_CRITERIA, "0.01")}
"""A threshold of the right form for each criterion."""


def correction_problems(config: RunConfig) -> Iterable[Violation]:
    """Every violation."""
    correction = config.algorithm.rollout_correction
    try:
        importance_bounds(correction)
    except ValueError as error:
        key = f"{CORRECTION}.rollout_is_threshold"
        yield Violation({key: correction.rollout_is_threshold}, str(error), {key: 2.0})
        if correction.rollout_rs is not None and correction.rollout_rs_threshold is None:
            return  # the same threshold once more
    yield from _criteria_problems(correction)
    yield from _bypass_problems(config)


def _criteria_problems(correction: RolloutCorrectionConfig) -> Iterable[Violation]:
    if correction.rollout_rs is None:
        return
    key, names = f"{CORRECTION}.rollout_rs", criteria_names(correction.rollout_rs)
    wrong = [name for name in names if name not in CRITERIA]
    if wrong or not names:
        nearest: Any = ",".join(dict.fromkeys(nearest_name(name, CRITERIA) for name in names)) or None
        rule = f"must be one or more, with commas between them, of {', '.join(CRITERIA)}"
        yield Violation({key: correction.rollout_rs}, rule, {key: nearest}, wrong_name=bool(names))
        return
    lower_key = f"{CORRECTION}.rollout_rs_threshold_lower"
    if correction.rollout_rs_threshold_lower is not None and not set(names) & set(RATIO_CRITERIA):
        rule = f"is of no use to rollout_rs={correction.rollout_rs}: write LOWER_UPPER where there are two bounds"
        yield Violation({lower_key: correction.rollout_rs_threshold_lower}, rule, {lower_key: None})
    try:
        criteria(correction)
    except ValueError as error:
        key = f"{CORRECTION}.rollout_rs_threshold"
        named: dict[str, Any] = {key: correction.rollout_rs_threshold}
        if correction.rollout_rs_threshold is None and set(names) <= set(RATIO_CRITERIA):
            named[f"{CORRECTION}.rollout_is_threshold"] = correction.rollout_is_threshold
        lowest = correction.rollout_rs_threshold_lower
        examples = EXAMPLES if lowest is None or lowest <= 2 else EXAMPLES | dict.fromkeys(RATIO_CRITERIA, f"{lowest}")
        yield Violation(named, str(error), {key: ",".join(examples[name] for name in names)})


def _bypass_problems(config: RunConfig) -> Iterable[Violation]:
    correction, loss = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss
    mode_key = f"{ACTOR}.policy_loss.loss_mode"
    bypass_key, type_key = f"{CORRECTION}.bypass_mode", f"{CORRECTION}.loss_type"
    if not correction.bypass_mode:
        if loss.loss_mode == "bypass_mode":
            rule = f"needs {bypass_key}=true"
            yield Violation({mode_key: loss.loss_mode}, rule, {mode_key: "vanilla"})
        if correction.loss_type == "reinforce":
            rule = f"is the loss of {bypass_key}=true, which is false; without it {mode_key} selects the loss"
            yield Violation({type_key: correction.loss_type}, rule, {type_key: "ppo_clip"})
        return
    replaced = POLICY_LOSSES["vanilla"].names
    if correction.loss_type == "reinforce" and loss.loss_mode not in replaced:
        rule = f"must be one of {', '.join(replaced)} with {type_key}=reinforce, which would replace it"
        yield Violation({mode_key: loss.loss_mode}, rule, {mode_key: "vanilla"})
    if correction.rollout_is_batch_normalize:
        key = f"{CORRECTION}.rollout_is_batch_normalize"
        rule = f"must be false with {bypass_key}=true, where a micro-batch does not have the weights of the others"
        yield Violation({key: True}, rule, {key: False})
    if loss.top_entropy_quantile < 1:
        key = f"{ACTOR}.policy_loss.top_entropy_quantile"
        rule = f"must be 1.0 with {bypass_key}=true, where no pass of the trainer measures entropies before the update"
        yield Violation({key: loss.top_entropy_quantile}, rule, {key: 1.0})
    if "sum_pi_squared" in estimator_traits(config).reads:
        estimator = f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
        rule = f"must be false: {estimator} needs log-probs that the trainer computes"
        nearest: dict[str, Any] = {bypass_key: False}
        nearest |= {type_key: "ppo_clip"} if correction.loss_type == "reinforce" else {}
        nearest |= {mode_key: "vanilla"} if loss.loss_mode == "bypass_mode" else {}
        yield Violation({bypass_key: True}, rule, nearest)
