"""A key and its requested value, before any check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class _TakenAway:
    """The value of a key that Hydra's `~key` removes."""

    def __repr__(self) -> str:
        return "taken away"


TAKEN_AWAY = _TakenAway()
OVERRIDE = "override"
"""The origin of settings of a command line."""


@dataclass(frozen=True)
class Setting:
    """A dotted key and its value. origin: the file's name, or `OVERRIDE`. prefix: Hydra's `+`, `++` or `~`."""

    key: str
    value: Any
    origin: str
    prefix: str = ""

    @property
    def written(self) -> str:
        """The key as the user wrote it."""
        return self.prefix + self.key


def nested(settings: list[Setting]) -> dict[str, Any]:
    """The settings as nested groups. Where a value stands in the place of a group, the group's keys go one level up."""
    tree: dict[str, Any] = {}
    for setting in settings:
        *groups, name = setting.key.split(".")
        place = tree
        for group in groups:
            inner = place.setdefault(group, {})
            place = inner if isinstance(inner, dict) else place
        place[name] = setting.value
    return tree


def final_settings(settings: list[Setting]) -> tuple[list[Setting], list[Setting]]:
    """The settings that count, in their order, and each `~key` that removed nothing.

    If a key has several values, the last one counts, at its place.
    """
    kept: dict[str, Setting] = {}
    idle = []
    for setting in settings:
        if setting.value is not TAKEN_AWAY:
            kept.pop(setting.key, None)
            kept[setting.key] = setting
            continue
        group = f"{setting.key}."
        gone = [key for key in kept if key == setting.key or key.startswith(group)]
        for key in gone:
            del kept[key]
        if not gone:
            idle.append(setting)
    return list(kept.values()), idle
