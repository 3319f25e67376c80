"""Rules of `algorithm.rollout_correction`: valid criteria and thresholds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_rl.config.correction import (
    CRITERIA,
    DIVERGENCE_CRITERIA,
    RATIO_CRITERIA,
    RolloutCorrectionConfig,
    criteria,
    criteria_names,
    importance_bounds,
)
from megatron_rl.config.keys import CORRECTION
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
