"""From an ablation's file to its points: which there are, what they are called, and what tells them apart. Pure."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.config.problems import nearest_name
from megatron_rl.errors import ConfigError, shown
from megatron_rl.trials.ablation_file import NAME, AblationConfig, Settings

ACTOR_MEGATRON = "actor_rollout_ref.actor.megatron"
LAYOUT = {
    f"{ACTOR_MEGATRON}.tensor_model_parallel_size": "tp",
    f"{ACTOR_MEGATRON}.pipeline_model_parallel_size": "pp",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout_tp",
    "trainer.nnodes": "nnodes",
    "trainer.n_gpus_per_node": "ranks",
}
"""Keys that every report shows as columns -> what they are called in a point's name."""


@dataclass(frozen=True)
class Point:
    """One run. settings: of the file's overrides, changed by this point's own, which are `own`.

    key: a hash of the base configuration's settings with these; what has the same key would be the same run.
    """

    name: str
    key: str
    settings: Settings
    own: Settings

    @property
    def overrides(self) -> list[str]:
        """As the command line takes them. JSON is YAML, so that every value comes back as it was."""
        return [f"{key}={json.dumps(value)}" for key, value in self.settings.items()]


def points_of(ablation: AblationConfig, base: Settings) -> list[Point]:
    """All combinations of the grid but the excluded ones, then the explicit points; the same run is listed once.

    base: the base configuration's own settings. Raises ConfigError where two runs have the same name, where there is no
    run, and for a baseline that is not there.
    """
    axes = [[(key, value) for value in values] for key, values in ablation.grid.items()]
    combinations = [dict(combination) for combination in itertools.product(*axes)] if axes else []
    kept = [own for own in combinations if not any(_agrees(own, excluded) for excluded in ablation.exclude)]
    explicit = [{key: value for key, value in point.items() if key != NAME} for point in ablation.points]
    short = short_names({key for own in [*kept, *explicit] for key in own})
    names = [point.get(NAME) for point in ablation.points]
    points: dict[str, Point] = {}
    for own, name in zip([*kept, *explicit], [*(None for _ in kept), *names], strict=True):
        settings = ablation.overrides | own
        key = run_key(base | settings)
        points.setdefault(key, Point(name or name_of(own, short), key, settings, own))
    found = list(points.values())
    _check(found, ablation)
    return found


def run_key(settings: Mapping[str, object]) -> str:
    """A hash of a run's settings, whatever their order."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Key -> as few of its last parts as tell it from the others; layout sizes have names of their own."""
    keys = sorted(set(keys))
    found = {key: LAYOUT[key] for key in keys if key in LAYOUT}
    rest = [key for key in keys if key not in LAYOUT]
    for key in rest:
        parts = key.split(".")
        for count in range(1, len(parts) + 1):
            end = ".".join(parts[-count:])
            if sum(other == end or other.endswith(f".{end}") for other in rest) == 1 or count == len(parts):
                found[key] = end
                break
    return found


def name_of(own: Settings, short: Mapping[str, str]) -> str:
    """tp2-pp2-rollout_tp1-use_dynamic_bsz=true: what a point's folder is called."""
    parts = [f"{short[key]}{'' if key in LAYOUT else '='}{shown(value)}" for key, value in own.items()]
    return re.sub(r"[^\w.=+-]+", "_", "-".join(parts)) or "base"


def _agrees(own: Settings, excluded: Settings) -> bool:
    return all(key in own and own[key] == value for key, value in excluded.items())


def _check(points: Sequence[Point], ablation: AblationConfig) -> None:
    if not points:
        raise ConfigError("the ablation has no point: give `grid` values or list `points`")
    names = [point.name for point in points]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"different points have the same name, {', '.join(twice)}: give them a `name`")
    strange = [name for name in names if re.fullmatch(r"\w[\w.=+-]*", name) is None]
    if strange:
        raise ConfigError(f"the name {strange[0]!r} must be letters, digits and any of _.=+-, as it names a folder")
    for key in ("baseline", "chosen"):
        named = getattr(ablation, key)
        if named is not None and named not in names:
            raise ConfigError(f"{key}={named} must be the name of a point; nearest: {nearest_name(named, names)}")
