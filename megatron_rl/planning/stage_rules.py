"""Rules of pipeline stages: the layers of all models must spread over them. Finds the nearest sizes that fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.config.keys import ACTOR
from megatron_rl.config.megatron import COUNTED_PARTS, MegatronConfig
from megatron_rl.config.problems import divisors, nearest_number
from megatron_rl.errors import Violation
from megatron_rl.parallel.stages import StagePlan
from megatron_rl.planning.folder_checks import ModelSizes

SHARES = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_last_pipeline_stage",
    "num_layers_in_first_pipeline_stage",
)
"""Keys of the layers of each stage; null: one chunk each, or an equal share."""
PP = "pipeline_model_parallel_size"
EVEN = MegatronConfig()


def spreads(models: Iterable[ModelSizes], megatron: MegatronConfig) -> bool:
    """Whether the layers of every model spread over the stages."""
    return not any(_broken_rule(model, megatron) for model in models)


def pp_sizes(models: Sequence[ModelSizes], megatron: MegatronConfig, world_size: int) -> list[int]:
    """PP sizes that divide the ranks and over which all models spread; with even stages if no others fit."""
    for shares in (megatron, EVEN):
        valid = [pp for pp in divisors(world_size) if spreads(models, replace(shares, pipeline_model_parallel_size=pp))]
        if valid:
            break
    return valid


def stage_problems(
    models: Sequence[ModelSizes], megatron: MegatronConfig, world_size: int, group: str = f"{ACTOR}.megatron"
) -> Iterable[Violation]:
    """The rules of StagePlan that the models break. All sizes must be >= 1.

    group: the keys of `megatron`.
    """
    broken: dict[str, str] = {}
    for model in models:
        rule = _broken_rule(model, megatron)
        if rule is not None:
            broken.setdefault(rule, model.path)
    given = {key: getattr(megatron, key) for key in (PP, *SHARES, *COUNTED_PARTS)}
    settings = {f"{group}.{key}": value for key, value in given.items() if value is not None and value is not False}
    for rule, path in broken.items():
        changes = _nearest(models, megatron, world_size)
        nearest = {f"{group}.{key}": value for key, value in changes.items()}
        yield Violation(settings, f"({path})", nearest, subject=rule)


def _broken_rule(model: ModelSizes, megatron: MegatronConfig) -> str | None:
    try:
        StagePlan.from_config(model.num_hidden_layers, megatron)
    except ValueError as error:
        return str(error)
    return None


def _nearest(models: Sequence[ModelSizes], megatron: MegatronConfig, world_size: int) -> dict[str, Any]:
    """The nearest valid sizes: one changed number if that is enough (a given share, else PP), else even stages."""
    fewest_layers = min(model.num_hidden_layers for model in models)
    for key in SHARES:
        given = getattr(megatron, key)
        if given is None:
            continue
        changed: list[dict[str, Any]] = [{key: size} for size in range(1, fewest_layers + 1)]
        valid = [change[key] for change in changed if spreads(models, replace(megatron, **change))]
        if valid:
            return {key: nearest_number(given, valid)}
    nearest = nearest_number(megatron.pipeline_model_parallel_size, pp_sizes(models, megatron, world_size))
    if spreads(models, replace(megatron, pipeline_model_parallel_size=nearest)):
        return {PP: nearest}
    even = {key: None for key in SHARES if getattr(megatron, key) is not None}
    return {PP: nearest} | even | {key: False for key in COUNTED_PARTS if getattr(megatron, key)}
