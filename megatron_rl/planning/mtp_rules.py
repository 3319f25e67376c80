"""Rules of `rollout.speculative=mtp`: which models have a multi-token prediction layer, and what goes with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megatron_rl.config.drafts import EARLIER, MTP
from megatron_rl.config.keys import ACTOR, ROLLOUT
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.planning.model_folder import ModelSizes

KEY, FACTOR = f"{ROLLOUT}.speculative", f"{ACTOR}.mtp_loss_scaling_factor"


def mtp_problems(config: RunConfig, models: Sequence[ModelSizes]) -> Iterable[Violation]:
    """Every violation."""
    shared = config.actor_rollout_ref
    factor, given = shared.actor.mtp_loss_scaling_factor, {KEY: MTP}
    is_trained = 0 < factor < math.inf  # other values are faults of their own
    if shared.rollout.speculative != MTP:
        if is_trained:
            rule = f"trains a layer that only {KEY}={MTP} reads"
            yield Violation({FACTOR: factor}, rule, {FACTOR: 0.0})
        return
    if shared.model.lora.rank:
        rule = "do not go together: adapters do not include the layer that makes draft tokens"
        yield Violation(given | {"actor_rollout_ref.model.lora.rank": shared.model.lora.rank}, rule, {KEY: EARLIER})
    if shared.rollout.quantization is not None:
        rule = "do not go together: the layer has no FP8 weights"
        yield Violation(given | {f"{ROLLOUT}.quantization": shared.rollout.quantization}, rule, {KEY: EARLIER})
    counted = {
        "async_training.partial_rollout": config.async_training.partial_rollout,
        f"{ROLLOUT}.over_sample_rate": shared.rollout.over_sample_rate,
    }
    if asked := {key: value for key, value in counted.items() if value}:
        rule = "do not go together: engine steps are counted, and the steps that draft tokens save depend on rounding"
        yield Violation(given | asked, rule, {KEY: EARLIER})
    if is_trained and shared.model.enable_tree_training:
        rule = "do not go together: in a prefix tree a token may have several next tokens"
        trees = {"actor_rollout_ref.model.enable_tree_training": True}
        yield Violation({FACTOR: factor} | trees, rule, {FACTOR: 0.0})
    model = next((model for model in models if model.path == shared.model.path), None)
    if model is not None and model.no_mtp is not None:
        yield Violation(given, f"needs a multi-token prediction layer in {model.path}: {model.no_mtp}", {KEY: EARLIER})
