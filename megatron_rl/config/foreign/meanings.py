"""Where a key that a script sets, to a value that is a choice here too, does something else in verl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.foreign.key_rows import alike
from megatron_rl.config.foreign.translate import Kind, Note
from megatron_rl.config.setting import Setting


@dataclass(frozen=True)
class Meaning:
    """One row of the table, whose text says what the fields are."""

    key: str
    here: str
    values: tuple[Any, ...] | None = None
    off: tuple[Any, ...] = ()
    needs: tuple[tuple[str, Any], ...] = ()
    unless: tuple[str, ...] = ()

    def is_about(self, value: Any) -> bool:
        """Whether there is something to say of this value of the key."""
        named = self.values is None or any(alike(value, other) for other in self.values)
        return named and not any(alike(value, other) for other in self.off)


@cache
def table() -> tuple[Meaning, ...]:
    """All rows, in their order."""
    rows = yaml.safe_load((Path(__file__).parent / "meanings.yaml").read_text())
    return tuple(
        Meaning(
            key,
            row["here"],
            tuple(row["values"]) if "values" in row else None,
            tuple(row.get("nothing_at", ())),
            tuple(row.get("if", {}).items()),
            tuple(row.get("unless", ())),
        )
        for key, row in rows.items()
    )


def meanings(settings: Sequence[Setting]) -> list[Note]:
    """What to say of the settings of a script, which has each key once."""
    given = {setting.key: setting for setting in settings}
    notes = []
    for row in table():
        setting = given.get(row.key)
        if setting is None or not row.is_about(setting.value):
            continue
        values = {key: other.value for key, other in given.items()}
        meets = all(alike(values.get(key), value) for key, value in row.needs)
        if meets and not any(values.get(key) for key in row.unless):
            notes.append(Note(Kind.DIFFERS, setting, row.here))
    return notes
