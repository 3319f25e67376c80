"""Where a key that nobody has set means something else in verl than here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.foreign.key_rows import alike
from megatron_rl.config.keys import value_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import shown


@dataclass(frozen=True)
class Default:
    """verl's default of a key, and why it is another here. changes: results | speed | files."""

    key: str
    verl: Any
    reason: str
    changes: str
    counts_if: tuple[tuple[str, Any], ...] = ()
    is_ported: bool = True

    def counts(self, config: RunConfig) -> bool:
        """Whether the key means anything in a configuration."""
        return all(value_of(config, key) == value for key, value in self.counts_if)


@dataclass(frozen=True)
class Difference:
    """A key that nobody has set: its value here and verl's."""

    default: Default
    here: Any

    def __str__(self) -> str:
        one = self.default
        return f"differs from verl: {one.key}={shown(self.here)}, there {shown(one.verl)} ({one.changes}: {one.reason})"


@cache
def verl_defaults() -> tuple[Default, ...]:
    """Of all keys whose defaults differ."""
    rows = yaml.safe_load((Path(__file__).parent / "verl_defaults.yaml").read_text())
    return tuple(
        Default(key, row["verl"], row["here"], row["changes"], tuple(row.get("if", {}).items()), row.get("port", True))
        for key, row in rows.items()
    )


def differences(config: RunConfig, given: Collection[str]) -> list[Difference]:
    """Those that count in a configuration. given: keys that were set."""
    found = []
    for default in verl_defaults():
        here = value_of(config, default.key)
        if default.key not in given and default.counts(config) and not alike(here, default.verl):
            found.append(Difference(default, here))
    return found
