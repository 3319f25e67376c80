"""The table of verl keys: rows in the YAML files of this folder, and the rows that match a setting.

A row has
    keys         patterns: `{a,b}` is a or b, `*` a part of a name, `**` the rest of a key, <ROLE>, <TRAINED>, <MODEL>
                 stand for the keys of roles (see `MACROS`)
    when         the only values that the row is for; without it, all
    only         the only texts of $1 that the row is for
    values       value there: the value here, or equal settings here; {}: none is needed
    nothing_at   values that ask for nothing here, or `any`
    to           the key here; $1, $2 are what the braces took, $last the key's last part, $rest what `**` took
    convert      how the value becomes one here, a name of `conversions.py`; where it has no answer the row continues
    feature      what all other values ask for and is not here
    instead      what to do instead
    why          the reason, one line
    keeps_known: true      keys of the schema are left alone
    unless_choice: true    values that the key may have here are left alone
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

FILES = ("training", "generation", "data_and_rewards", "runs", "sft")
ANY = "any"
MACROS = {
    "<ROLE>": "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic,reward_model}",
    "<TRAINED>": "{actor_rollout_ref.actor,critic}",
    "<MODEL>": "(actor_rollout_ref,critic,reward_model,reward.reward_model).model",
}


class Differs(str):
    """Why a value that is taken does something else in verl."""

    __slots__ = ()


Outcome = dict[str, Any] | str | None
"""The result of a conversion: settings here; why nothing needs to be set, or what differs; None: the row continues."""


@dataclass(frozen=True)
class KeyRow:
    """One row; the text of this file says what its fields mean."""

    keys: list[str]
    when: list[Any] | None = None
    only: list[str] | None = None
    values: dict[Any, Any] = field(default_factory=dict)
    nothing_at: list[Any] | str = ""
    to: str | None = None
    convert: str | None = None
    feature: str | None = None
    instead: str = ""
    why: str = ""
    keeps_known: bool = False
    unless_choice: bool = False

    @cached_property
    def patterns(self) -> list[re.Pattern[str]]:
        """The keys as regular expressions."""
        return [compiled(key) for key in self.keys]

    def match(self, key: str) -> re.Match[str] | None:
        """Match the whole key with the first pattern that fits it; None if none does."""
        for pattern in self.patterns:
            match = pattern.fullmatch(key)
            if match is not None and (self.only is None or match[1] in self.only):
                return match
        return None

    def switches_off(self, value: Any) -> bool:
        """Return True for a value that asks for nothing."""
        return self.nothing_at == ANY or any(alike(value, other) for other in self.nothing_at)


def compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern of the table as a regular expression."""
    for macro, text in MACROS.items():
        pattern = pattern.replace(macro, text)
    text = re.escape(pattern)
    for written, meant in (
        (r"\{", "("),
        (r"\}", ")"),
        (r"\(", "(?:"),
        (r"\)", ")"),
        (",", "|"),
        (r"\*\*", "(?P<rest>.+)"),
        (r"\*", "[^.]*"),
    ):
        text = text.replace(written, meant)
    return re.compile(text)


def alike(left: Any, right: Any) -> bool:
    """Return True for equal values: numbers by value, lists in any order, `None` and `null` alike."""
    left, right = (None if value == "None" else value for value in (left, right))
    if isinstance(left, list) and isinstance(right, list):
        return sorted(map(str, left)) == sorted(map(str, right))
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return bool(left == right)


def filled(text: str, match: re.Match[str]) -> str:
    """Fill in `$1`, `$last` and `$rest` of a row's text."""
    named = {"last": match.string.rpartition(".")[2], "rest": match.groupdict().get("rest") or ""}
    text = re.sub(r"\$(last|rest)", lambda word: named[word[1]], text)
    return re.sub(r"\$(\d)", lambda word: match[int(word[1])] or "", text)


@cache
def table() -> tuple[KeyRow, ...]:
    """All rows, in the order in which they are asked."""
    return tuple(KeyRow(**row) for name in FILES for row in read_table(name))


def read_table(name: str) -> Any:
    """The content of a YAML file of this folder, without its ending."""
    return yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text())


def rows_for(key: str, value: Any) -> Iterator[tuple[KeyRow, re.Match[str]]]:
    """Every row for this key and value, in order."""
    for row in table():
        if row.when is not None and not any(alike(value, other) for other in row.when):
            continue
        match = row.match(key)
        if match is not None:
            yield row, match


def is_foreign(key: str, value: Any) -> bool:
    """Return whether a row is about this key with this value."""
    return next(rows_for(key, value), None) is not None
