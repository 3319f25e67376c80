"""Checks of runs that read images: who trains a vision tower, and which layers the first stage must have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from megatron_rl.config.keys import ACTOR
from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.config.roles import PoolSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.parallel.stages import StagePlan
from megatron_rl.planning.folder_checks import ModelSizes
from megatron_rl.planning.layout_rules import models_of
from megatron_rl.planning.stage_rules import PP, SHARES

FREEZE = f"{ACTOR}.megatron.freeze_vision_model"


def image_problems(config: RunConfig, pools: Iterable[PoolSpec], models: Sequence[ModelSizes]) -> Iterable[Violation]:
    """Return a tower that no task trains, and models whose first chunk has fewer layers than read features of images:
    features are on that chunk's rank alone, and hidden states alone are sent to the next one.
    """
    if not config.generates and not config.actor_rollout_ref.actor.megatron.freeze_vision_model:
        rule = f"is only for runs that generate responses: {config.trainer.stage} reads images by the folder's tower"
        yield Violation({FREEZE: False}, rule, {FREEZE: True})
    if config.data.image_key is None:
        return
    for pool in pools:
        for role in pool.megatron_roles[:1]:
            for model in models_of(pool.megatron_roles, models):
                form = None if model.model is None else model.model.images
                layers = _layers_of_first_chunk(model, role.megatron)
                if form is None or layers is None or layers >= form.levels:
                    continue
                group = f"{role.key}.megatron"
                given = {f"{group}.{key}": getattr(role.megatron, key) for key in (PP, *SHARES)}
                yield Violation(
                    {key: value for key, value in given.items() if value is not None},
                    f"must leave the first {form.levels} layers of {model.path} in the first stage, or in its first "
                    f"chunk, as they read features of images; it has {layers}",
                )


def _layers_of_first_chunk(model: ModelSizes, megatron: MegatronConfig) -> int | None:
    """Return how many layers the first chunk has; None: the layers do not spread, which is reported elsewhere."""
    with suppress(ValueError):
        return StagePlan.from_config(model.num_hidden_layers, megatron).chunk_sizes[0][0]
    return None
