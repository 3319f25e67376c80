"""Keys that a script sets, with values that are choices here too, and that do something else in verl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from megatron_rl.config.setting import Setting
from megatron_rl.config.verl_compat.key_rows import alike, read_table
from megatron_rl.config.verl_compat.translate import Kind, Note


@dataclass(frozen=True)
class Meaning:
    """One row of semantic_differences.yaml, whose text says what the fields mean."""

    here: str
    values: list[Any] | None = None
    nothing_at: list[Any] = field(default_factory=list)
    needs: dict[str, Any] = field(default_factory=dict)
    unless: list[str] = field(default_factory=list)

    def is_for(self, value: Any) -> bool:
        """Return True for a value of the key that has another meaning in verl."""
        is_named = self.values is None or any(alike(value, other) for other in self.values)
        return is_named and not any(alike(value, other) for other in self.nothing_at)


@cache
def table() -> dict[str, Meaning]:
    """Key -> its row, in their order."""
    return {key: Meaning(**row) for key, row in read_table("semantic_differences").items()}


def meanings(settings: Sequence[Setting]) -> list[Note]:
    """The notes of a script's settings, which have each key once."""
    given = {setting.key: setting for setting in settings}
    values = {setting.key: setting.value for setting in settings}
    notes = []
    for key, row in table().items():
        if key not in given or not row.is_for(values[key]) or any(values.get(other) for other in row.unless):
            continue
        if all(alike(values.get(other), value) for other, value in row.needs.items()):
            notes.append(Note(Kind.DIFFERS, given[key], row.here))
    return notes
