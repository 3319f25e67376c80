"""What must stay: `--keep key=value`, as values that every choice of the search is held against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_rl.config.keys import value_of
from megatron_rl.config.load import read_override
from megatron_rl.config.schema import RunConfig


@dataclass(frozen=True)
class Keeps:
    """Dotted key -> value that it must have."""

    values: Mapping[str, Any]

    @classmethod
    def of(cls, config: RunConfig, texts: Sequence[str]) -> Keeps:
        """As `config`, which was read with them as overrides, has them. Raises ConfigError for a text without `=`."""
        keys = [setting.key for text in texts for setting in read_override(text)]
        return cls({key: value_of(config, key) for key in keys})

    def allow(self, settings: Mapping[str, Any]) -> bool:
        """Whether settings have every kept value that they have at all."""
        if not self.values:
            return True
        return all(settings[key] == value for key, value in self.values.items() if key in settings)

    def touch(self, prefix: str) -> bool:
        """Whether a key is kept that begins so."""
        return any(key.startswith(prefix) for key in self.values)

    @cached_property
    def pools(self) -> dict[str, str]:
        """Group of a role's keys -> the pool that it must live in."""
        return {key.removesuffix(".pool"): str(pool) for key, pool in self.values.items() if key.endswith(".pool")}

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)
