"""Every dotted key of the schema with its type and constraints, and the values of a configuration by key.

The user names groups of their own below `pools`, `reward_models` and `distillation.teacher_models`: the elements of the
schema's dicts of dataclasses.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

from megatron_rl.config.constraints import Constraints, constraints_of
from megatron_rl.config.schema import MISSING, RunConfig

ACTOR, ROLLOUT, REF, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref", "critic"
CORRECTION = "algorithm.rollout_correction"
"""Dotted names of groups."""

INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


@cache
def fields_of(group: type) -> dict[str, Constraints]:
    """Name of each field of a dataclass -> the constraints of its value, whose `kind` may be the group below it."""
    hints = typing.get_type_hints(group, include_extras=True)
    return {name: constraints_of(hint) for name, hint in hints.items()}


def _leaves(group: type, prefix: str = "", is_ours: bool = False) -> Iterator[tuple[str, Constraints]]:
    for name, field in fields_of(group).items():
        whose = field.is_ours or is_ours
        if _is_group(field.kind):
            yield from _leaves(field.kind, f"{prefix}{name}.", whose)
        else:
            yield prefix + name, dataclasses.replace(field, is_ours=whose)


def _element_group(kind: Any) -> type | None:
    """The class of the groups in a `dict[str, GROUP]`; None for any other type."""
    element = typing.get_args(kind)[-1] if typing.get_origin(kind) is dict else None
    return element if _is_group(element) else None


_ALL = dict(_leaves(RunConfig))
ELEMENT_GROUPS = {key: group for key, leaf in _ALL.items() if (group := _element_group(leaf.kind)) is not None}
"""Keys below which the user names groups -> the class of such a group."""

LEAVES = {key: leaf for key, leaf in _ALL.items() if key not in ELEMENT_GROUPS}
KEYS = {key: leaf.kind for key, leaf in LEAVES.items()}
"""Every dotted key of the schema, with its constraints and with its type; of named groups see `NAMED_GROUPS`."""

NAMED_GROUPS = {top: dict(_leaves(group, is_ours=_ALL[top].is_ours)) for top, group in ELEMENT_GROUPS.items()}
"""Keys below which the user names groups -> the keys of such a group, with their constraints."""

OPEN_KEYS = {key for key, kind in KEYS.items() if typing.get_origin(kind) is dict}
"""Keys under which the user may put names of their own."""

GROUPS = {key[:end] for key in KEYS for end, character in enumerate(key) if character == "."}
"""Every dotted name that has keys below it."""


def in_named_group(key: str) -> tuple[str, str, str] | None:
    """(key below which it is named, its name, the rest) of a dotted key in a group of the user's; else None.

    Name and rest may be "".
    """
    for top in NAMED_GROUPS:
        if key == top or key.startswith(f"{top}."):
            name, _, below = key[len(top) + 1 :].partition(".")
            return top, name, below
    return None


def is_key(key: str) -> bool:
    """Whether the schema has a key, or lets the user name it."""
    return leaf_of(key) is not None or key in GROUPS or any(key.startswith(f"{open_key}.") for open_key in OPEN_KEYS)


def leaf_of(key: str) -> Constraints | None:
    """Type and constraints of a dotted key; None for an unknown key."""
    named = in_named_group(key)
    return LEAVES.get(key) if named is None else NAMED_GROUPS[named[0]].get(named[2])


def type_of(key: str) -> Any:
    """The type of a dotted key, without constraints; None for an unknown key."""
    leaf = leaf_of(key)
    return None if leaf is None else leaf.kind


def leaves_of(config: RunConfig) -> Iterator[tuple[str, Constraints]]:
    """Every key that a configuration's command reads, with those of the groups that the user named."""
    leaves = dict(LEAVES)
    for top, group in NAMED_GROUPS.items():
        leaves |= {f"{top}.{name}.{key}": leaf for name in value_of(config, top) for key, leaf in group.items()}
    return ((key, leaf) for key, leaf in leaves.items() if not config.ignores(key))


def value_of(config: RunConfig, key: str) -> Any:
    """The value of a dotted key. Raises AttributeError or KeyError for an unknown key."""
    value: Any = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


@cache
def declared_defaults() -> dict[str, Any]:
    """Key -> its default, which may be an interpolation; of named groups below `TOP.*`."""
    config: Any = RunConfig()
    for top, group in ELEMENT_GROUPS.items():
        value_of(config, top)["*"] = group()
    return {key: value_of(config, key) for key, _ in leaves_of(config)}


def default_of(key: str) -> Any:
    """The default of a key, with the defaults of the keys it follows put in; None for a mandatory key."""
    named = in_named_group(key)
    default = declared_defaults()[key if named is None else f"{named[0]}.*.{named[2]}"]
    if not isinstance(default, str) or default == MISSING:
        return None if default == MISSING else default
    leader = INTERPOLATION.fullmatch(default)
    return default_of(leader[1]) if leader else INTERPOLATION.sub(lambda match: str(default_of(match[1])), default)


@cache
def _leaders() -> dict[str, str]:
    """Every key whose default is another key's value -> that key; of named groups below `TOP.*`."""
    leaders = {
        key: INTERPOLATION.fullmatch(value) for key, value in declared_defaults().items() if isinstance(value, str)
    }
    return {key: match[1] for key, match in leaders.items() if match is not None}


@cache
def follows() -> dict[str, str]:
    """Every key whose default is another key's value -> that key; without those of named groups."""
    return {key: leader for key, leader in _leaders().items() if key in KEYS}


def followed_keys(config: RunConfig) -> dict[str, str]:
    """Every key whose default is another key's value -> that key, with those of the groups that the user named."""
    keys = dict(follows())
    for key, leader in _leaders().items():
        top, star, below = key.partition(".*.")
        if star:
            keys |= {f"{top}.{name}.{below}": leader for name in value_of(config, top)}
    return keys


def put(config: RunConfig, key: str, value: Any) -> None:
    """Set a key, and those that follow it as long as they had its value, as an override does."""
    _put(config, key, value, followed_keys(config))


def _put(config: RunConfig, key: str, value: Any, followed: dict[str, str]) -> None:
    old = value_of(config, key)
    group, _, name = key.rpartition(".")
    setattr(value_of(config, group), name, value)
    for follower, leader in followed.items():
        if leader == key and value_of(config, follower) == old:
            _put(config, follower, value, followed)
