"""A run whose models have few layers: the same layout, shapes and collectives at a fraction of the time. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.megatron import COUNTED_PARTS, UNEVEN_STAGES, MegatronConfig
from megatron_rl.config.roles import Placement, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError
from megatron_rl.model.families import inside_of

LAYERS, VISION, LEVELS = "num_hidden_layers", "vision_config", "deepstack_visual_indexes"


def with_fewer_layers(config: RunConfig, layers_per_stage: int, folder: Path) -> list[str]:
    """Write folders with the config.json of every model, cut to that many layers a stage; returns overrides with them.

    layers_per_stage: layers of each chunk of a stage; embedding and loss are among them where they count as layers.
    Settings with an entry for each layer are cut, too, and a vision tower's features for layers. Raises ConfigError
    where a model has fewer layers than that.
    """
    overrides: dict[str, str] = {}
    for role in Placement.of(config).roles.values():
        if role.model_of is not None or role.is_actor:
            continue  # its model is another role's, whose folder counts
        counted = sum(getattr(layout_of(config, role), part) for part in COUNTED_PARTS)
        wanted = layers_per_stage * num_chunks(config, role) - counted
        target = folder / role.name
        model = ModelFolder(role.model_path)
        num_layers = model.settings[LAYERS]
        if num_layers < wanted:
            raise ConfigError(
                f"--layers {layers_per_stage} makes {wanted} layers of role {role.name}, whose model has "
                f"{num_layers}; try: leave --layers out"
            )
        target.mkdir(exist_ok=True)
        (target / "config.json").write_text(
            json.dumps(with_fewer_levels(cut_settings(model.content, wanted), layers_per_stage))
        )
        overrides.setdefault(role.model_key, str(target))
        uneven = [name for name in UNEVEN_STAGES if role.is_trained and getattr(role.megatron, name) is not None]
        overrides |= {f"{role.key}.megatron.{name}": str(layers_per_stage) for name in uneven}
    return [f"{key}={value}" for key, value in overrides.items()]


def layout_of(config: RunConfig, role: RoleSpec) -> MegatronConfig:
    """Return the layout of the pool that trains a role's model."""
    placement = Placement.of(config)
    leader = placement.leader if role.model_key == placement.leader.model_key else role
    return placement.pool_of(leader.name).layout


def num_chunks(config: RunConfig, role: RoleSpec) -> int:
    """Return the chunks of a role's model over all stages of its pool."""
    layout = layout_of(config, role)
    return layout.pipeline_model_parallel_size * (layout.virtual_pipeline_model_parallel_size or 1)


def cut_settings(settings: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Return config.json's settings of a model with fewer layers, the first ones."""
    inside = inside_of(settings.get("architectures"))
    if inside is not None and inside.key in settings:
        return settings | {inside.key: cut_settings(settings[inside.key], num_layers)}
    before = settings[LAYERS]
    per_layer = {key: value[:num_layers] for key, value in settings.items() if _is_per_layer(value, before)}
    return settings | per_layer | {LAYERS: num_layers}


def with_fewer_levels(settings: dict[str, Any], most: int) -> dict[str, Any]:
    """Return settings whose vision tower makes features for at most that many layers: the first stage has no more."""
    vision = settings.get(VISION)
    if not isinstance(vision, dict) or not isinstance(vision.get(LEVELS), list):
        return settings
    return settings | {VISION: vision | {LEVELS: vision[LEVELS][:most]}}


def _is_per_layer(value: Any, num_layers: int) -> bool:
    return isinstance(value, list) and len(value) == num_layers
