"""The file that describes an ablation. Its names, types and keys are checked before anything else happens.

configs/ablation.yaml is an example, with a comment for each key.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.config.keys import GROUPS, KEYS
from megatron_rl.config.load import read_override, read_tree, unknown_key
from megatron_rl.config.problems import nearest_name, raise_problems, violations_of
from megatron_rl.config.setting import TAKEN_AWAY
from megatron_rl.config.verl_compat.key_rows import is_foreign
from megatron_rl.errors import ConfigError, Violation

NAME = "name"
"""The key of an explicit point that is no key of the run's configuration."""

OWN_KEYS = ("trainer.default_local_dir", "trainer.resume_mode", "trainer.resume_from_path")
"""Keys that the ablation sets, as every point has a folder of its own and starts again."""

LARGEST, MOST_REPEATS = 1e12, 1000
A_NUMBER = f"must be a number above 0 and at most {LARGEST:g}"

Settings = dict[str, Any]
"""Dotted key of the run's configuration, or of verl's, -> value; `TAKEN_AWAY` for a `~key` of the command line."""


@dataclass(frozen=True)
class AblationConfig:
    """The content of a file.

    config: the base configuration's file. overrides: settings of all points. grid: key -> values; each combination of
    values is a point. points: further points. exclude: combinations to leave out; one is left out if it agrees with any
    of these. baseline: name of the point that ratios refer to. warmup_steps: steps at the start that do not count.
    time_limit_s: seconds of one run. hardware, prompt_length, response_length: options of `megatron-rl plan`. repeats:
    runs of each point, in rounds over all points, whose steps count together. chosen: name of the point whose regret is
    reported; None: the point predicted to be the fastest.
    """

    config: str
    folder: str = "outputs/ablation"
    overrides: Settings = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    points: list[Settings] = field(default_factory=list)
    exclude: list[Settings] = field(default_factory=list)
    baseline: str | None = None
    warmup_steps: int = 1
    time_limit_s: float = 1800.0
    hardware: str | None = None
    prompt_length: float | None = None
    response_length: float | None = None
    repeats: int = 1
    chosen: str | None = None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LARGEST


def _is_count(value: Any, least: int = 0, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_list_of_settings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) and item for item in value)


def _is_grid(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(values, list) and values for values in value.values())


RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "config": (_is_text, "must name a configuration file"),
    "folder": (_is_text, "must name a folder"),
    "overrides": (lambda value: isinstance(value, dict), "must map dotted keys to values"),
    "grid": (_is_grid, "must map dotted keys to lists of values"),
    "points": (_is_list_of_settings, "must be a list of maps from dotted keys to values"),
    "exclude": (_is_list_of_settings, "must be a list of maps from dotted keys to values"),
    "baseline": (_is_text, "must be the name of a point"),
    "warmup_steps": (_is_count, "must be a whole number, 0 or more"),
    "time_limit_s": (_is_number, A_NUMBER),
    "hardware": (_is_text, "must be a name or a file"),
    "prompt_length": (_is_number, A_NUMBER),
    "response_length": (_is_number, A_NUMBER),
    "repeats": (partial(_is_count, least=1, most=MOST_REPEATS), f"must be a whole number from 1 to {MOST_REPEATS}"),
    "chosen": (_is_text, "must be the name of a point"),
}
MAY_BE_NULL = {field.name for field in dataclasses.fields(AblationConfig) if field.default is None}


def read_ablation(path: Path, overrides: Sequence[str] = ()) -> AblationConfig:
    """The content of a file, with `key=value` overrides of the runs' configuration for all points.

    Raises ConfigError with everything that is wrong with names, types and keys. The preflight of each point checks the
    values.
    """
    tree = _read(path)
    names = [item.name for item in dataclasses.fields(AblationConfig)]
    violations = []
    for name, value in tree.items():
        if name not in names:
            nearest = {nearest_name(name, names): value}
            violations.append(
                Violation({name: value}, f"({path})", nearest, subject=f"unknown key {name}", wrong_name=True)
            )
        elif not (value is None and name in MAY_BE_NULL) and not RULES[name][0](value):
            violations.append(Violation({name: value}, f"({path}) {RULES[name][1]}"))
    if "config" not in tree:
        violations.append(Violation({}, f"{path} must name the base configuration: config: configs/demo_cpu.yaml"))
    raise_problems(f"cannot use {path}", violations)
    ablation = AblationConfig(**tree)
    raise_problems(f"cannot use {path}", [*_key_problems(ablation, path)])
    return dataclasses.replace(ablation, overrides=ablation.overrides | _parsed(overrides))


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"no ablation file at {path}; the one of this repository is configs/ablation.yaml")
    return read_tree(path, f"keys: {', '.join(RULES)}")


def _key_problems(ablation: AblationConfig, path: Path) -> Iterator[Violation]:
    """Keys that the runs' configuration does not have, and keys that an ablation may not vary."""
    places = [("overrides", ablation.overrides), ("grid", ablation.grid)]
    places += [(f"points[{number}]", point) for number, point in enumerate(ablation.points)]
    places += [(f"exclude[{number}]", point) for number, point in enumerate(ablation.exclude)]
    for place, settings in places:
        for key, value in settings.items():
            where = f"({place} of {path})"
            if key == NAME and place.startswith("points"):
                if not _is_text(value):
                    yield Violation({NAME: value}, f"{where} must be a text")
            elif key in GROUPS:
                inner = nearest_name(key, [name for name in KEYS if name.startswith(f"{key}.")])
                yield Violation({key: value}, f"{where} is a group of keys; write one with dots, as {inner}")
            else:
                yield from _run_key_problems(str(key), value, where)


def _run_key_problems(key: str, value: Any, where: str) -> Iterator[Violation]:
    """The problems of one key that is no group. One of verl's is translated with the point that has it."""
    values = value if isinstance(value, list) else [value]
    unknown = None if any(map(partial(is_foreign, key), values)) else unknown_key(key, value, where)
    if unknown is not None:
        yield unknown
    elif key in OWN_KEYS:
        yield Violation({key: value}, f"{where} is set by the ablation: leave it out")


def _parsed(overrides: Sequence[str]) -> Settings:
    """Overrides of the command line as settings. Raises ConfigError with all problems of their keys."""
    settings: Settings = {}
    violations: list[Violation] = []
    for text in overrides:
        try:
            settings |= {setting.key: setting.value for setting in read_override(text)}
        except ConfigError as error:
            violations += violations_of(error)
    for key, value in settings.items():
        if value is not TAKEN_AWAY:
            violations += _run_key_problems(key, value, "(override)")
    raise_problems("cannot use the overrides", violations)
    return settings
