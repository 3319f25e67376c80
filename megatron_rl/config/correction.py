"""Keys of `algorithm.rollout_correction`, and how their texts are read. No torch.

Two of verl's keys hold more than one number: `rollout_is_threshold` may be `LOWER_UPPER`, and `rollout_rs` is a list of
criteria with commas between them, to which `rollout_rs_threshold` has one threshold each, or one for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Gt, Le

from megatron_rl.config.constraints import Nearest, OneOf, UnitInterval

IS_LEVELS = ("token", "sequence")
LOSS_TYPES = ("ppo_clip", "reinforce")

RATIO_CRITERIA = ("token", "sequence", "geometric")
"""Criteria of older verl versions, whose thresholds bound p_trainer / p_rollout."""

K1_CRITERIA = ("token_k1", "seq_sum_k1", "seq_mean_k1")
"""Criteria whose thresholds bound p_rollout / p_trainer: verl's k1 is -log(p_trainer / p_rollout)."""

DIVERGENCE_CRITERIA = (
    *("token_k2", "token_k3", "seq_sum_k2", "seq_sum_k3", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
    "binary_kl",
)
"""Criteria whose thresholds bound a divergence, from above only."""

CRITERIA = (*K1_CRITERIA, *DIVERGENCE_CRITERIA, *RATIO_CRITERIA)
"""Choices of `rollout_rs`."""


@dataclass
class RolloutCorrectionConfig:
    """Corrections for the difference between the rollout's probabilities and the trainer's. Names are verl's."""

    rollout_is: Annotated[str | None, OneOf(IS_LEVELS)] = None
    """Importance sampling: weight the policy loss by p_trainer / p_rollout, per token | sequence; null: no weights."""
    rollout_is_threshold: Any = 2.0
    """A number: largest importance weight (truncated IS). LOWER_UPPER, such as 0.5_5.0: weights outside are 0
    (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Scale the importance weights of a step to a mean of 1, over tokens, or with rollout_is=sequence over
    responses."""
    rollout_rs: str | None = None
    """Rejection sampling: leave tokens or responses out of the policy loss that a criterion rejects; of several
    criteria, with commas between them, all must accept. token_k1 | token_k2 | token_k3 | binary_kl | seq_sum_k1 |
    seq_sum_k2 | seq_sum_k3 | seq_mean_k1 | seq_mean_k2 | seq_mean_k3 | seq_max_k2 | seq_max_k3 | token | sequence |
    geometric; null: none."""
    rollout_rs_threshold: Any = None
    """Threshold of rollout_rs: one for all criteria, or one each with commas between them. k1: LOWER_UPPER, or UPPER
    with 1 / UPPER as the other bound; k2, k3 and binary_kl: the largest value. null: rollout_is_threshold, for token,
    sequence and geometric only."""
    rollout_rs_threshold_lower: UnitInterval | None = None
    """rollout_rs=token, sequence, geometric: smallest ratio that is accepted; null: 1 / the largest one."""
    rollout_token_veto_threshold: Annotated[float | None, Gt(0), Le(1), Nearest(0.0001)] = None
    """Leave out responses with a token whose ratio p_trainer / p_rollout is below this; null: none."""
    bypass_mode: bool = False
    """Use the rollout's log-probs as the old ones and skip the trainer's pass; importance weights and criteria are then
    computed with the policy in each update."""
    loss_type: Annotated[str, OneOf(LOSS_TYPES)] = "ppo_clip"
    """Policy loss with bypass_mode: ppo_clip | reinforce: the log-prob, weighted as rollout_is says, without a clip."""


@dataclass(frozen=True)
class Criterion:
    """One criterion of `rollout_rs`: its measure must be >= low, unless low is None, and <= high."""

    name: str
    low: float | None
    high: float


def bounds(threshold: Any) -> tuple[float | None, float]:
    """(lower or None, upper) of a number or of `LOWER_UPPER`. Raises ValueError with the required form."""
    text = threshold.strip() if isinstance(threshold, str) else threshold
    lower, underscore, upper = text.partition("_") if isinstance(text, str) else ("", "", text)
    if not underscore:
        upper = text
    try:
        if isinstance(upper, bool):
            raise ValueError
        low, high = float(lower) if underscore else None, float(upper)
    except (TypeError, ValueError):
        raise ValueError("must be a number, or LOWER_UPPER such as 0.5_2.0") from None
    if not (math.isfinite(high) and high > 0 and (low is None or 0 < low <= high)):
        raise ValueError("must be finite numbers > 0, the lower one first")
    return low, high


def importance_bounds(config: RolloutCorrectionConfig) -> tuple[float | None, float]:
    """(lower or None, upper) of `rollout_is_threshold`. Raises ValueError as `bounds`."""
    return bounds(config.rollout_is_threshold)


def criteria_names(rollout_rs: str | None) -> list[str]:
    """The listed criteria, each once."""
    listed = [] if rollout_rs is None else [name.strip() for name in rollout_rs.split(",")]
    return list(dict.fromkeys(name for name in listed if name))


def threshold_texts(config: RolloutCorrectionConfig) -> list[Any]:
    """The thresholds in `rollout_rs_threshold`, one for each criterion or one for all; an empty list if it is null."""
    threshold = config.rollout_rs_threshold
    if isinstance(threshold, str):
        return [text.strip() for text in threshold.split(",") if text.strip()]
    return [] if threshold is None else [threshold]


def criteria(config: RolloutCorrectionConfig) -> list[Criterion]:
    """The criteria of `rollout_rs` with their thresholds. Raises ValueError for a wrong name or threshold."""
    names, texts = criteria_names(config.rollout_rs), threshold_texts(config)
    if len(texts) not in (0, 1, len(names)):
        raise ValueError(f"must be one threshold, or one for each of {len(names)} criteria")
    thresholds = (texts or [None]) * (1 if len(texts) > 1 else len(names))
    return [_criterion(name, threshold, config) for name, threshold in zip(names, thresholds, strict=True)]


def _criterion(name: str, threshold: Any, config: RolloutCorrectionConfig) -> Criterion:
    if name not in CRITERIA:
        raise ValueError(f"{name} is no criterion")
    if threshold is None:
        if name not in RATIO_CRITERIA:
            raise ValueError(f"must be set, as rollout_rs={name} has no threshold of its own")
        threshold = importance_bounds(config)[1]
    low, high = bounds(threshold)
    if name in DIVERGENCE_CRITERIA:
        if low is not None:
            raise ValueError(f"must be one number for {name}, which has no lower bound")
        return Criterion(name, None, high)
    if name in RATIO_CRITERIA and config.rollout_rs_threshold_lower is not None:
        low = config.rollout_rs_threshold_lower
    if low is None and high <= 1:
        raise ValueError("must be > 1, because the lower bound is 1 / threshold")
    low = 1 / high if low is None else low
    if low > high:
        raise ValueError(f"must be >= the lower bound, which is {low:g}")
    return Criterion(name, low, high)
