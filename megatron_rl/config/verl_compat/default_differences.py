"""Keys whose defaults are others in verl than here."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.config.keys import value_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.verl_compat.key_rows import alike, read_table
from megatron_rl.errors import shown

PORTED = "# Made by `megatron-rl port`"
"""What the first line of a file of `port` begins with."""
RESULTS = "results"
"""`changes` of a default that changes what is learnt, not only speed or files."""


@dataclass(frozen=True)
class Default:
    """One row of verl_defaults.yaml, whose text says what the fields mean."""

    key: str
    verl: Any
    reason: str
    changes: str
    counts_if: dict[str, Any] = field(default_factory=dict)
    is_ported: bool = True


@dataclass(frozen=True)
class Difference:
    """A key that is not set: its value here and verl's."""

    default: Default
    here: Any

    def __str__(self) -> str:
        default, here = self.default, shown(self.here)
        there = f"there {shown(default.verl)} ({default.changes}: {default.reason})"
        return f"differs from verl: {default.key}={here}, {there}"


@cache
def verl_defaults() -> tuple[Default, ...]:
    """The rows of all keys whose defaults differ."""
    return tuple(Default(key, **row) for key, row in read_table("verl_defaults").items())


def is_ported(file: Path) -> bool:
    """Return whether a configuration file was written by `megatron-rl port`."""
    with suppress(OSError), file.open(errors="replace") as opened:
        return opened.readline().startswith(PORTED)
    return False


def differences(config: RunConfig, given: Collection[str]) -> list[Difference]:
    """The differences that count in a configuration. given: keys that were set."""
    different = []
    for default in verl_defaults():
        here = value_of(config, default.key)
        counts = all(value_of(config, key) == value for key, value in default.counts_if.items())
        if default.key not in given and counts and not alike(here, default.verl):
            different.append(Difference(default, here))
    return different
