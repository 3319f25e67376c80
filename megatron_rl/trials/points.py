"""The points of an ablation: settings, name and key; then the rules that it breaks, or layout and expected numbers."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config.keys import is_key
from megatron_rl.config.load import read_config, read_file
from megatron_rl.config.problems import nearest_name, raise_problems
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.setting import TAKEN_AWAY, Setting
from megatron_rl.config.verl_compat.translate import Kind, Note, translate
from megatron_rl.errors import ConfigError, Violation, shown
from megatron_rl.planning.checked_config import only_ppo
from megatron_rl.planning.hardware import planned_hardware
from megatron_rl.planning.preflight import preflight
from megatron_rl.planning.run_plan import RunPlan, mean_lengths
from megatron_rl.trials.ablation_file import NAME, AblationConfig, Settings
from megatron_rl.trials.trial import Trial

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
LONGEST_OPTIONS = 100
"""Characters of options beyond which reports show the name of a point instead."""


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


@dataclass(frozen=True)
class GroupSizes:
    """The layout of a run: sizes of its groups. other_pools, other_ranks: pools other than the actor's."""

    tp: int
    pp: int
    dp: int
    rollout_tp: int
    cp: int = 1
    other_pools: int = 0
    other_ranks: int = 0

    @property
    def num_ranks(self) -> int:
        return self.tp * self.cp * self.pp * self.dp + self.other_ranks

    def __str__(self) -> str:
        cp = f"CP{self.cp} " if self.cp > 1 else ""
        pools = f", {1 + self.other_pools} pools" if self.other_pools else ""
        return f"TP{self.tp} {cp}PP{self.pp} DP{self.dp} \N{RIGHTWARDS ARROW} TP{self.rollout_tp}{pools}"


@dataclass(frozen=True)
class Expected:
    """The planner's numbers of one run, each of the worst rank.

    step_s: seconds of one step. peak_bytes: at the worst moment. received_bytes: in one resharding to rollout mode.
    """

    step_s: float
    peak_bytes: int
    received_bytes: int
    fits: bool


@dataclass(frozen=True)
class PlannedPoint:
    """A point with either violations, so that it is never started, or a layout and expectations.

    options: its own settings other than the layout, as text.
    """

    point: Point
    options: str
    violations: list[Violation]
    layout: GroupSizes | None = None
    expected: Expected | None = None

    @property
    def label(self) -> str:
        """Its name in reports."""
        if self.layout is None:
            return self.point.name
        options = self.options if len(self.options) <= LONGEST_OPTIONS else f"({self.point.name})"
        return f"{self.layout} {options}".rstrip()

    @property
    def reason(self) -> str:
        """All violations in one line."""
        return "; ".join(map(str, self.violations))


def trial_of(point: Point, ablation: AblationConfig, folder: Path, round_: int = 0) -> Trial:
    """The trial of a point in one round; it never resumes. folder: the ablation's."""
    fresh = ("trainer.resume_mode=disable", "trainer.resume_from_path=null")
    return Trial(Path(ablation.config), folder / "points" / round_name(point.name, round_), (*point.overrides, *fresh))


def plan_points(ablation: AblationConfig, folder: Path) -> list[PlannedPoint]:
    """The plan of every point, by the preflight and the planner of a single run. Raises ConfigError as `points_of`."""
    base = {setting.key: setting.value for setting in read_file(Path(ablation.config))}
    points = points_of(ablation, base)
    short = short_names({key for point in points for key in point.own})
    return [_planned(point, short, ablation, folder) for point in points]


def _planned(point: Point, short: dict[str, str], ablation: AblationConfig, folder: Path) -> PlannedPoint:
    others = {short[key]: value for key, value in point.own.items() if key not in LAYOUT}
    options = " ".join(f"{name}={shown(value)}" for name, value in others.items())
    config, violations = read_config(ablation.config, trial_of(point, ablation, folder).overrides)
    if config is not None:
        only_ppo(config, "ablate")
        violations = [*violations, *preflight(config), *_recording_problems(config, ablation)]
    if config is None or violations:
        return PlannedPoint(point, options, violations)
    hardware = planned_hardware(config, ablation.hardware)
    lengths = mean_lengths(config.data, ablation.prompt_length, ablation.response_length)
    plan = RunPlan.of(config, hardware, lengths)
    grid = plan.models.grid
    return PlannedPoint(
        point,
        options,
        [],
        GroupSizes(
            grid.tp_size,
            grid.pp_size,
            grid.dp_size,
            plan.models.rollout.tp_size,
            grid.cp_size,
            len(plan.models.pools) - 1,
            plan.models.placement.world_size - grid.world_size,
        ),
        Expected(
            plan.step_seconds,
            plan.memory.peak,
            max(map(sum, zip(plan.transition.network, plan.transition.link, strict=True))),
            plan.memory.fits,
        ),
    )


def _recording_problems(config: RunConfig, ablation: AblationConfig) -> Sequence[Violation]:
    """Violations of rules for runs whose records are read afterwards."""
    violations = []
    steps, logger = config.trainer.total_training_steps, list(config.trainer.logger)
    if steps is not None and steps <= ablation.warmup_steps:
        rule = f"must be more than the ablation's warmup_steps={ablation.warmup_steps}, which do not count"
        key = "trainer.total_training_steps"
        violations.append(Violation({key: steps}, rule, {key: ablation.warmup_steps + 1}))
    if "jsonl" not in logger:
        rule = "must have jsonl, which the ablation reads"
        violations.append(Violation({"trainer.logger": logger}, rule, {"trainer.logger": [*logger, "jsonl"]}))
    return violations
