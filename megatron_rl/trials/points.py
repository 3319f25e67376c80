"""The points of an ablation's file: their settings, names and keys. Pure."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.config.keys import is_key
from megatron_rl.config.problems import nearest_name, raise_problems
from megatron_rl.config.setting import TAKEN_AWAY, Setting
from megatron_rl.config.verl_compat.translate import Kind, Note, translate
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
"""Keys that every report shows as columns -> their short names in the name of a point."""


OWN = "ablation"
"""The origin of settings that are an ablation's."""


@dataclass(frozen=True)
class Point:
    """One run. own: the settings of this point alone. settings: the file's overrides with these. Both have the schema's
    keys; notes: how verl's were translated.

    key: a hash of the base configuration's settings with these; points with equal keys would be the same run.
    """

    name: str
    key: str
    settings: Settings
    own: Settings
    notes: tuple[Note, ...] = ()

    @property
    def overrides(self) -> list[str]:
        """The settings as overrides of the command line. JSON is YAML, so every value is read back unchanged."""
        return [
            f"~{key}" if value is TAKEN_AWAY else f"{key}={json.dumps(value)}" for key, value in self.settings.items()
        ]


def points_of(ablation: AblationConfig, base: Settings) -> list[Point]:
    """All combinations of the grid but the excluded ones, then the explicit points. Equal runs are listed once.

    base: the base configuration's own settings. Raises ConfigError if different runs have the same name, if there is no
    run, for a baseline or chosen point that does not exist, and for keys of verl's that are not supported.
    """
    shared, of_all = _translated(ablation.overrides, base)

    def translated(own: Settings) -> tuple[Settings, list[Note]]:
        return _translated(own, base | ablation.overrides)

    excluded = [translated(own)[0] for own in ablation.exclude]
    axes = [[(key, value) for value in values] for key, values in ablation.grid.items()]
    combinations = [dict(combination) for combination in itertools.product(*axes)] if axes else []
    kept = [found for found in map(translated, combinations) if not any(_agrees(found[0], other) for other in excluded)]
    explicit = [translated({key: value for key, value in point.items() if key != NAME}) for point in ablation.points]
    short = short_names({key for own, _ in [*kept, *explicit] for key in own})
    names = [point.get(NAME) for point in ablation.points]
    points: dict[str, Point] = {}
    for (own, notes), name in zip([*kept, *explicit], [*(None for _ in kept), *names], strict=True):
        settings = shared | own
        key = run_key(base | settings)
        points.setdefault(key, Point(name or name_of(own, short), key, settings, own, (*of_all, *notes)))
    unsupported = {str(note): note for _, notes in [*kept, *explicit, (shared, of_all)] for note in notes}
    raise_problems(
        "the ablation cannot run",
        [note.violation() for note in unsupported.values() if note.kind is Kind.UNSUPPORTED],
    )
    _check(list(points.values()), ablation)
    return list(points.values())


def _translated(settings: Settings, before: Settings) -> tuple[Settings, list[Note]]:
    """Return settings under the schema's keys, and notes of those that changed. before: settings that they follow."""
    given = [Setting(key, value, "base") for key, value in before.items()]
    given += [Setting(key, value, OWN) for key, value in settings.items()]
    translation = translate(given, is_key)
    taken_away = {key: value for key, value in settings.items() if value is TAKEN_AWAY}
    ours = {setting.key: setting.value for setting in translation.settings if setting.origin == OWN}
    return taken_away | ours, [note for note in translation.notes if note.setting.origin == OWN]


def run_key(settings: Mapping[str, object]) -> str:
    """A hash of a run's settings, which does not depend on their order."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Key -> as few of its last parts as tell it from the others. Layout sizes have the names of `LAYOUT`."""
    keys = sorted(set(keys))
    names = {key: LAYOUT[key] for key in keys if key in LAYOUT}
    rest = [key for key in keys if key not in LAYOUT]
    for key in rest:
        parts = key.split(".")
        ends = [".".join(parts[start:]) for start in reversed(range(len(parts)))]
        names[key] = next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in rest) == 1), key)
    return names


def name_of(own: Settings, short: Mapping[str, str]) -> str:
    """The name of a point and its folder, such as tp2-pp2-rollout_tp1-use_dynamic_bsz=true."""
    parts = [f"{short[key]}{'' if key in LAYOUT else '='}{shown(value)}" for key, value in own.items()]
    return re.sub(r"[^\w.=+-]+", "_", "-".join(parts)) or "base"


def round_name(name: str, round_: int) -> str:
    """The name of the folder of a point's round, counted from 0."""
    return f"{name}-round{round_ + 1}" if round_ else name


def _agrees(own: Settings, excluded: Settings) -> bool:
    return bool(excluded) and all(key in own and own[key] == value for key, value in excluded.items())


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
    rounds = {round_name(name, round_): name for name in names for round_ in range(1, ablation.repeats)}
    for name in names:
        if name in rounds:
            rule = f"must not be the name of a further round of {rounds[name]} (repeats={ablation.repeats})"
            raise ConfigError(f"the name {name} {rule}: give the point another `name`")
    for key in ("baseline", "chosen"):
        named = getattr(ablation, key)
        if named is not None and named not in names:
            raise ConfigError(f"{key}={named} must be the name of a point; did you mean: {nearest_name(named, names)}")
