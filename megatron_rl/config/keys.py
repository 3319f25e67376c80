"""Read and write a configuration by dotted keys, of groups that the user names too."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_rl.config.load import ELEMENT_GROUPS, INTERPOLATION, follows
from megatron_rl.config.schema import RunConfig


def value_of(config: RunConfig, key: str) -> Any:
    """The value of a dotted key. Raises AttributeError or KeyError where there is none."""
    found: Any = config
    for part in key.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    return found


def followed_keys(config: RunConfig) -> dict[str, str]:
    """Every key whose default is another key's value -> that key; with those of the groups that the user named."""
    found = dict(follows())
    for top, leaders in _element_leaders().items():
        for name in value_of(config, top):
            found |= {f"{top}.{name}.{key}": leader for key, leader in leaders.items()}
    return found


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


def _element_leaders() -> dict[str, dict[str, str]]:
    """Top-level key of named groups -> key inside of such a group -> the key that it follows."""
    return {top: dict(_leaders(ELEMENT_GROUPS[top]())) for top in ELEMENT_GROUPS}


def _leaders(group: Any, prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if dataclasses.is_dataclass(value):
            found += _leaders(value, f"{prefix}{field.name}.")
        elif isinstance(value, str) and (match := INTERPOLATION.fullmatch(value)):
            found.append((f"{prefix}{field.name}", match[1]))
    return found
