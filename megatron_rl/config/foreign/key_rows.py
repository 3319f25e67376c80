"""The table of foreign keys: rows of YAML files beside this one, and which row a setting meets.

A row has
    keys         patterns: `{a,b}` is a or b, `*` a part of a name, `**` the rest of a key, <ROLE>, <TRAINED>, <MODEL>
                 stand for the keys of roles (see `MACROS`)
    when         the only values that it is about (all, where left out)
    only         what $1 must be
    values       value here for a value there, or the settings that say the same; {}: nothing needs to be said
    nothing_at   values that ask for nothing here, or `any`
    to           the key here; $1, $2 are what the braces took, $last the key's last part, $rest what `**` took
    convert      how the value becomes one here, a name of `conversions.py`; where it has no answer the row goes on
    feature      what all other values ask for and is not here
    instead      what to do instead
    with         keys that mean something only with that feature
    why          the reason, one line
    known: keep  keys of the schema are left alone
    unless_choice: true    values that the key may have here are left alone
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILES = ("training", "generation", "data_and_rewards", "runs", "stages")
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
"""What a conversion returns: settings here; why nothing needs to be set, or what differs; None: the row goes on."""


@dataclass(frozen=True)
class KeyRow:
    """One row; see the text of this file. The fields are those of the YAML."""

    keys: tuple[str, ...]
    when: tuple[Any, ...] | None = None
    only: tuple[str, ...] | None = None
    values: tuple[tuple[Any, Any], ...] = ()
    off: tuple[Any, ...] | str = ()
    to: str | None = None
    convert: str | None = None
    feature: str | None = None
    instead: str = ""
    companions: tuple[str, ...] = ()
    why: str = ""
    keeps_known: bool = False
    unless_choice: bool = False
    patterns: tuple[re.Pattern[str], ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> KeyRow:
        """Raises ValueError for a field that no row has."""
        names = {"keys", "when", "only", "values", "nothing_at", "to", "convert", "feature", "instead", "with", "why"}
        if unknown := row.keys() - names - {"known", "unless_choice"}:
            raise ValueError(f"a row for {row['keys']} has {', '.join(sorted(unknown))}")
        off = row.get("nothing_at", ())
        return cls(
            tuple(row["keys"]),
            tuple(row["when"]) if "when" in row else None,
            tuple(row["only"]) if "only" in row else None,
            tuple(row.get("values", {}).items()),
            off if isinstance(off, str) else tuple(off),
            row.get("to"),
            row.get("convert"),
            row.get("feature"),
            row.get("instead", ""),
            tuple(row.get("with", ())),
            row.get("why", ""),
            row.get("known") == "keep",
            bool(row.get("unless_choice")),
            tuple(map(compiled, row["keys"])),
        )

    def match(self, key: str) -> re.Match[str] | None:
        """Of the first pattern that the whole key fits."""
        for pattern in self.patterns:
            match = pattern.fullmatch(key)
            if match is not None and (self.only is None or match[1] in self.only):
                return match
        return None

    def switches_off(self, value: Any) -> bool:
        """Whether a value asks for nothing."""
        return self.off == ANY or any(alike(value, other) for other in self.off)


def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of the table as a regular expression."""
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
    """Whether two values say the same: numbers by value, lists in any order, `None` and `null` alike."""
    left, right = (None if value == "None" else value for value in (left, right))
    if isinstance(left, list) and isinstance(right, list):
        return sorted(map(str, left)) == sorted(map(str, right))
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return bool(left == right)


def filled(text: str, match: re.Match[str]) -> str:
    """`$1`, `$last` and `$rest` of a row's text put in."""
    named = {"last": match.string.rpartition(".")[2], "rest": match.groupdict().get("rest") or ""}
    text = re.sub(r"\$(last|rest)", lambda found: named[found[1]], text)
    return re.sub(r"\$(\d)", lambda found: match[int(found[1])] or "", text)


@cache
def table() -> tuple[KeyRow, ...]:
    """All rows, in the order in which they are asked."""
    return tuple(KeyRow.of(row) for name in FILES for row in read_rows(name))


def read_rows(name: str) -> list[dict[str, Any]]:
    """The rows of one of FILES, as written."""
    return list(yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text()))


def rows_for(key: str, value: Any) -> Iterator[tuple[KeyRow, re.Match[str]]]:
    """Every row that is about this key with this value, in order."""
    for row in table():
        if row.when is not None and not any(alike(value, other) for other in row.when):
            continue
        match = row.match(key)
        if match is not None:
            yield row, match
