"""Read a YAML file and dotted overrides into a RunConfig, or raise one ConfigError that lists every problem.

file, overrides -> settings (dotted key, value, origin) -> checked one by one against the schema -> RunConfig
"""

from __future__ import annotations

import math
import os
import pickle
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.config.file_kinds import instead_of_file
from megatron_rl.config.keys import (
    ELEMENT_GROUPS,
    GROUPS,
    INTERPOLATION,
    KEYS,
    NAMED_GROUPS,
    default_of,
    in_named_group,
    is_key,
    leaf_of,
    type_of,
)
from megatron_rl.config.megatron import FP8_FORMATS, TE_LINEAR
from megatron_rl.config.presets import preset_defaults
from megatron_rl.config.problems import like_name, raise_problems, refused, violations_of
from megatron_rl.config.rollout_keys import FP8
from megatron_rl.config.schema import MISSING, RunConfig
from megatron_rl.config.setting import OVERRIDE, TAKEN_AWAY, Setting
from megatron_rl.config.synonyms import key_note, suggested_key
from megatron_rl.config.tasks import REWARD
from megatron_rl.config.verl_compat.translate import Kind, Note, translate
from megatron_rl.config.yaml_text import YAML_PROBLEMS, read_yaml, refuse_depth
from megatron_rl.errors import ConfigError, Violation

HYDRA_PREFIXES = ("++", "+", "~")
"""Prefixes of Hydra's overrides: set or add, add, remove."""

ACTOR_MODEL, CRITIC_MODEL = "actor_rollout_ref.model.path", "critic.model.path"
DTYPE = "actor_rollout_ref.actor.megatron.dtype"
QUANTIZATION = "actor_rollout_ref.rollout.quantization"
DIFF_BOUNDS = {
    "actor_rollout_ref.rollout.logprob_diff_bound": {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.05, FP8: 1.0},
    "actor_rollout_ref.rollout.logprob_diff_mean_bound": {
        "float32": 1e-4,
        "bfloat16": 0.05,
        "float16": 0.005,
        FP8: 0.1,
    },
}
"""Defaults by compute dtype, or for products in FP8: above the rounding of small models (docs/scale/gpu.md)."""

CUDA_DEFAULTS = {
    DTYPE: "bfloat16",
    "actor_rollout_ref.actor.megatron.sequence_parallel": True,
    "actor_rollout_ref.rollout.enforce_eager": False,
    "async_training.second_buffer": False,
}
"""Defaults on GPUs: verl's, and no transfer next to generation, which no GPU has shown. On CPUs the schema's hold."""

OPTIONS = tuple(
    f"{role}.megatron.override_transformer_config"
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model")
)
"""Groups of Megatron's own options, by role."""

LARGEST_WHOLE = 2**63 - 1
"""The largest integer of torch and numpy."""


@dataclass(frozen=True)
class Reading:
    """The result of reading a file and its overrides.

    config: None if mandatory keys have no value. notes: how verl's keys and values were translated. settings: all that
    were given, under the schema's keys, in the order in which they count.
    """

    config: RunConfig | None
    violations: list[Violation]
    notes: list[Note]
    settings: tuple[Setting, ...]

    @property
    def given(self) -> frozenset[str]:
        """Keys of the schema that were set, by their own or another name."""
        return frozenset(setting.key for setting in self.settings)

    @property
    def overrides(self) -> dict[str, Any]:
        """Key of the schema -> value, of the settings of the command line."""
        return {setting.key: setting.value for setting in self.settings if setting.origin == OVERRIDE}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path`, apply `key=value` overrides in order, resolve interpolations.

    Values are checked for their type here and against their rules in `planning.preflight`. Raises ConfigError,
    listing all unknown keys, values of a wrong type and mandatory keys without a value.
    """
    config, violations = read_config(path, overrides)
    raise_problems(f"cannot use {path}", violations)
    if config is None:
        raise RuntimeError(f"{path} gave neither a configuration nor a violation")
    return config


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> tuple[RunConfig | None, list[Violation]]:
    """Read a configuration and return it with its violations, instead of raising for settings.

    An unknown key or a value of a wrong type counts as not given, so that further rules can be checked at once. The
    configuration is None if mandatory keys then have no value. Raises ConfigError for a file that cannot be read.
    """
    reading = read_run(path, overrides)
    return reading.config, reading.violations


def read_run(path: str | Path, overrides: Sequence[str] = (), task: str | None = None) -> Reading:
    """Read a file and overrides, with notes on verl's keys. task: None: that of `trainer.stage`."""
    violations: list[Violation] = []
    settings = list(read_file(Path(path)))
    for text in overrides:
        try:
            settings += read_override(text)
        except ConfigError as error:
            violations += violations_of(error)
    return read_settings(settings, violations, task)


def read_settings(
    settings: Sequence[Setting], violations: Sequence[Violation] = (), task: str | None = None
) -> Reading:
    """Apply settings in their order. violations: problems from before. task: as in `read_run`."""
    problems = list(violations)
    translation = translate(settings, is_key)
    config = pickle.loads(_schema())
    applied = []
    for setting in translation.settings:
        wrong = _apply(config, setting)
        if wrong is None:
            applied.append(setting)
        else:
            problems.append(wrong)
    problems += [note.violation() for note in translation.of(Kind.UNSUPPORTED)]
    given = {setting.key for setting in applied}
    _fill_in(config, given)
    _name_one_model(config, given, task)
    missing = list(_without_value(config))
    problems += missing
    run = None
    if not missing:
        try:
            run = OmegaConf.to_object(config)
        except OmegaConfBaseException as error:
            key = str(error.full_key)
            problems.append(Violation({key: _raw(config, key) if key in KEYS else None}, _first_line(error)))
    return Reading(run, problems, translation.notes, tuple(applied))


@cache
def _schema() -> bytes:
    """The schema with its defaults, pickled: reading that is forty times as fast as going through the classes again."""
    return pickle.dumps(OmegaConf.structured(RunConfig))


def _fill_in(config: Any, given: set[str]) -> None:
    """Set defaults that depend on other keys: verl's on GPUs, who computes in FP8 there, a preset's, and bounds by the
    dtype.
    """
    defaults: dict[str, Any] = {}
    if _raw(config, "trainer.device") == "cuda":
        in_eight_bits = [options for options in OPTIONS if _raw(config, f"{options}.fp8") in FP8_FORMATS]
        defaults = CUDA_DEFAULTS | {f"{options}.transformer_impl": TE_LINEAR for options in in_eight_bits}
    for key, value in (defaults | preset_defaults(lambda key: _resolved(config, key), given)).items():
        if key not in given:
            OmegaConf.update(config, key, value)
    for key, bounds in DIFF_BOUNDS.items():
        if key not in given and (kind := _kind_of_products(config)) in bounds:
            OmegaConf.update(config, key, bounds[kind])


def _kind_of_products(config: Any) -> Any:
    """The actor's dtype, or that its products or the weights of generation are in FP8."""
    in_eight_bits = _raw(config, f"{OPTIONS[0]}.fp8") in FP8_FORMATS or _raw(config, QUANTIZATION) == FP8
    return FP8 if in_eight_bits else _raw(config, DTYPE)


def _name_one_model(config: Any, given: set[str], task: str | None) -> None:
    """Training a reward model needs only one model folder: take the critic's if the actor's is not named."""
    own = _raw(config, CRITIC_MODEL)
    is_alone = ACTOR_MODEL not in given and isinstance(own, str) and INTERPOLATION.search(own) is None
    if is_alone and (task or _raw(config, "trainer.stage")) == REWARD:
        OmegaConf.update(config, ACTOR_MODEL, own)


def flat_settings(tree: dict[str, Any]) -> dict[str, Any]:
    """Dotted key -> value, of a configuration as nested dicts; sequences are lists, as JSON has them."""
    settings: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            settings |= {f"{name}.{key}": inner for key, inner in flat_settings(value).items()}
        else:
            settings[name] = list(value) if isinstance(value, tuple) else value
    return settings


def read_file(path: Path) -> Iterator[Setting]:
    """One setting for each leaf of a configuration file, unchecked. Raises ConfigError if it cannot be read."""
    lacks = instead_of_file(path)
    if lacks is not None:
        neighbours = [str(file) for file in path.parent.glob("[!.]*.y*ml") if file.is_file()]
        like = like_name(str(path), neighbours)
        hint = "no file of its folder has a name like it" if like is None else f"did you mean: {like}"
        raise ConfigError(f"no configuration file at {path}: {lacks}; {hint}")
    for name, value in read_tree(path, f"groups of keys: {_top_groups()}").items():
        yield from _flatten(name, value, str(path))


def read_tree(path: Path, content: str) -> dict[str, Any]:
    """The mapping in an existing YAML file. Raises ConfigError for other content. content: what the error asks for."""
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}; it must hold {content}")
    return {str(name): value for name, value in tree.items()}


def read_override(text: str) -> Iterator[Setting]:
    """The settings of one `key=value`, unchecked. Raises ConfigError for another text."""
    key, equals, value = text.partition("=")
    prefix = next((prefix for prefix in HYDRA_PREFIXES if key.startswith(prefix)), "")
    key = key.removeprefix(prefix).strip()
    if prefix == "~":
        return iter([Setting(key, TAKEN_AWAY, OVERRIDE, prefix)])
    if not equals:
        like = suggested_key(key)
        hint = "" if like is None else f"; did you mean: {like}=..."
        rule = f"override {text!r:.200} has no '=': write it as key=value{hint}"
        raise refused(Violation({}, rule))
    try:
        refuse_depth(value)
        parsed = OmegaConf.from_dotlist([f"value={value}"])
    except YAML_PROBLEMS as error:
        rule = f"the value of override {text!r:.200} cannot be parsed: {_first_line(error)}"
        raise refused(Violation({}, rule)) from error
    return _flatten(key, OmegaConf.to_container(parsed, resolve=False)["value"], OVERRIDE, prefix)


def _flatten(key: str, value: Any, origin: str, prefix: str = "") -> Iterator[Setting]:
    """One setting per leaf; an empty group sets nothing."""
    if isinstance(value, dict) and value and key not in KEYS:
        for name, inner in value.items():
            yield from _flatten(f"{key}.{name}", inner, origin, prefix)
    elif key not in (GROUPS | NAMED_GROUPS.keys()) or value not in (None, {}):
        yield Setting(key, value, origin, prefix)


def settings_of(tree: dict[str, Any], origin: str) -> Iterator[Setting]:
    """One setting for each leaf of nested groups."""
    for name, value in tree.items():
        yield from _flatten(name, value, origin)


def unknown_key(key: str, value: Any, where: str) -> Violation | None:
    """The violation of an unknown key, with the nearest known key; None for a known key."""
    named = in_named_group(key)
    if named is not None:
        top, name, inner = named
        if inner in NAMED_GROUPS[top]:
            return None
        if not inner:
            inner_keys = ", ".join(f"{top}.{name or 'NAME'}.{leaf}" for leaf in NAMED_GROUPS[top])
            return Violation({key: value}, f"{where}: it is a group of keys, not a value; set {inner_keys}")
        like = like_name(inner, NAMED_GROUPS[top])
        return _unknown(key, value, where, None if like is None else f"{top}.{name}.{like}")
    return None if is_key(key) else _unknown(key, value, where, suggested_key(key))


def _unknown(key: str, value: Any, where: str, like: str | None) -> Violation:
    note = key_note(key)
    nearest = {} if like is None or note else {like: value}
    hint = "" if nearest else "no key is like it: leave it out, or see docs/start/coming_from_verl.md"
    if note:
        hint = note if like is None else f"did you mean: {like} ({note})"
    return Violation({key: value}, where, nearest, hint, subject=f"unknown key {key}", wrong_name=True)


def _apply(config: Any, setting: Setting) -> Violation | None:
    """Put one setting into the config. Return its violation, or None."""
    key, given = setting.key, {setting.key: setting.value}
    top, name, below = in_named_group(key) or ("", "", "")
    if name:
        is_empty, groups = not below and setting.value in (None, {}), OmegaConf.select(config, top)
        if name not in groups and (is_empty or below in NAMED_GROUPS[top]):
            groups[name] = OmegaConf.structured(ELEMENT_GROUPS[top])
        if is_empty:
            return None
    if key in GROUPS:
        inner = ", ".join(sorted(name for name in KEYS if name.startswith(f"{key}.")))
        rule = f"({setting.origin}): {key} is a group of keys, not a value; set {inner}"
        return Violation(given, rule, subject=_written(setting))
    unknown = unknown_key(key, setting.value, f"({setting.origin})")
    if unknown is not None:
        return unknown
    try:
        is_whole = type_of(key) in (int, int | None) and isinstance(setting.value, int)
        if is_whole and abs(setting.value) > LARGEST_WHOLE:
            raise OverflowError(f"it has more than {LARGEST_WHOLE.bit_length()} bits")
        OmegaConf.update(config, key, _without_tilde(key, _in_type(key, setting.value)))
    except (OmegaConfBaseException, OverflowError) as error:
        rule = f"({setting.origin}) must be of type {_type_name(type_of(key))}: {_first_line(error)}"
        return Violation(given, rule, _nearest_in_type(setting), subject=_written(setting))
    return None


def _nearest_in_type(setting: Setting) -> dict[str, Any]:
    """A valid number in place of a wrong type: a fraction is rounded, anything else becomes the default."""
    key, value = setting.key, setting.value
    if KEYS.get(key) not in (int, float, int | None, float | None):
        return {}
    if isinstance(value, float) and math.isfinite(value):
        return {key: 1 if 0 < value < 1 else round(value)}
    default = default_of(key)
    return {} if default is None and KEYS[key] in (int, float) else {key: default}


def _in_type(key: str, value: Any) -> Any:
    """Accept what Python and Hydra users write: `None`, a name for a list with one name, a list in quotes."""
    kind = type_of(key)
    if value == "None" and (type(None) in typing.get_args(kind) or kind is Any):
        return None
    is_list = typing.get_origin(kind) is list or (kind is Any and str(value).startswith("["))
    if is_list and isinstance(value, str) and not INTERPOLATION.search(value):
        try:
            refuse_depth(value)
            read = yaml.safe_load(value)
        except YAML_PROBLEMS:
            return value
        return read if isinstance(read, list) else [value]
    return value


def _without_tilde(key: str, value: Any) -> Any:
    """Replace a leading "~" of a path by the user's home: shells do not after the "=" of an override."""
    leaf = leaf_of(key)
    if leaf is None or not leaf.is_path:
        return value
    if isinstance(value, list):
        return [_without_tilde(key, path) for path in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def _written(setting: Setting) -> str:
    return f"{setting.key}={setting.value!r}"


def _without_value(config: Any) -> Iterator[Violation]:
    values: Any = OmegaConf.to_container(config, resolve=False)
    missing = [key for key in KEYS if reduce(getitem, key.split("."), values) == MISSING]
    if missing:
        rule = f"set them in the file or as overrides ({missing[0]}=...)"
        subject = f"mandatory keys without a value: {', '.join(missing)};"
        yield Violation(dict.fromkeys(missing, None), rule, subject=subject)


def _raw(config: Any, key: str) -> Any:
    """A key's value with interpolations and the mark of a missing value left as they are."""
    group, _, name = key.rpartition(".")
    return OmegaConf.to_container(OmegaConf.select(config, group), resolve=False)[name]


def _resolved(config: Any, key: str) -> Any:
    """A key's value with interpolations resolved; None where they cannot be."""
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException:
        return None


def _type_name(kind: Any) -> str:
    return kind.__name__ if typing.get_origin(kind) is None else str(kind)


def _top_groups() -> str:
    return ", ".join(sorted({key.partition(".")[0] for key in KEYS}))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
