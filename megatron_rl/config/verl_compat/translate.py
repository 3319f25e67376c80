"""Translate verl's settings to the schema's, with a note of each that is renamed, ignored, different or unsupported."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from megatron_rl.config.keys import leaf_of
from megatron_rl.config.setting import OVERRIDE, Setting, final_settings
from megatron_rl.config.verl_compat.conversions import CONVERSIONS
from megatron_rl.config.verl_compat.key_rows import Differs, KeyRow, alike, filled, rows_for
from megatron_rl.errors import Violation, shown


class Kind(StrEnum):
    """The lists of notes, in the order in which they are printed."""

    RENAMED = "renamed"
    IGNORED = "ignored"
    DIFFERS = "differs"
    UNSUPPORTED = "not supported"


@dataclass(frozen=True)
class Note:
    """One setting that is not taken as it was written.

    became: the settings in its place. reason: why; of an unsupported one what to do instead. feature: the name of what
    an unsupported one asks for.
    """

    kind: Kind
    setting: Setting
    reason: str
    became: dict[str, Any] = field(default_factory=dict)
    feature: str = ""

    def __str__(self) -> str:
        given = f"{self.setting.written}={shown(self.setting.value)}"
        if self.kind is Kind.UNSUPPORTED:
            return f"{given}: {self.feature}; {self.reason}"
        became = " ".join(f"{key}={shown(value)}" for key, value in self.became.items())
        return "".join([given, f" -> {became}" if became else "", f": {self.reason}" if self.reason else ""])

    def violation(self) -> Violation:
        """The violation of a setting that is not supported."""
        setting = self.setting
        rule = f"({setting.origin}) asks for {self.feature}, which is not supported"
        subject = f"{setting.written}={shown(setting.value)}"
        return Violation({setting.key: setting.value}, rule, hint=self.reason, subject=subject)


class Noted:
    """Something that has notes of settings."""

    notes: list[Note]

    def of(self, kind: Kind) -> list[Note]:
        """The notes of one kind."""
        return [note for note in self.notes if note.kind is kind]

    @property
    def features(self) -> list[str]:
        """Names of what is not supported, each once."""
        return list(dict.fromkeys(note.feature for note in self.of(Kind.UNSUPPORTED)))


@dataclass(frozen=True)
class Translation(Noted):
    """Settings under the schema's keys, unknown keys as they are, and notes of those that were changed."""

    settings: list[Setting]
    notes: list[Note]


def translate(settings: Sequence[Setting], is_known: Callable[[str], bool]) -> Translation:
    """Translate settings. Of several values of a key the last one counts, and one of the command line in any case.

    is_known: True for a key of the schema.
    """
    final, idle = final_settings(list(settings))
    given = {setting.key: setting.value for setting in final}
    notes = [Note(Kind.IGNORED, setting, "there is nothing to take away; its default stays") for setting in idle]
    direct: list[Setting] = []
    mapped: list[Setting] = []  # after the others: such a value decides, whatever the key itself was set to
    for setting in final:
        if setting.value == {} and not is_known(setting.key):
            continue
        note = _note(setting, given, is_known)
        if note is None:
            direct.append(setting)
            continue
        notes.append(note)
        target = direct if setting.key in note.became else mapped
        target += [replace(setting, key=key, value=value, prefix="") for key, value in note.became.items()]
    return Translation(sorted([*direct, *mapped], key=lambda setting: setting.origin == OVERRIDE), notes)


def _note(setting: Setting, given: Mapping[str, Any], is_known: Callable[[str], bool]) -> Note | None:
    for row, match in rows_for(setting.key, setting.value):
        if row.keeps_known and is_known(setting.key):
            continue
        leaf = leaf_of(setting.key)
        if row.unless_choice and leaf is not None and setting.value in (leaf.choices or ()):
            continue
        note = _by_row(row, match, setting, given)
        if note is not None:
            return note
    return None


def _by_row(row: KeyRow, match: re.Match[str], setting: Setting, given: Mapping[str, Any]) -> Note | None:
    """The note that a row makes of a setting; None if it has none for this value."""
    key, value, why = setting.key, setting.value, filled(row.why, match)
    for theirs, ours in row.values.items():
        if alike(value, theirs):
            target = filled(row.to, match) if row.to else key
            became = _became(ours, target, match)
            return Note(Kind.RENAMED if became else Kind.IGNORED, setting, why, became)
    if row.switches_off(value):
        return Note(Kind.IGNORED, setting, why)
    if row.convert is not None:
        target = filled(row.to, match) if row.to else ""
        outcome = CONVERSIONS[row.convert](key, target, value, given)
        if isinstance(outcome, str):
            return Note(Kind.DIFFERS if isinstance(outcome, Differs) else Kind.IGNORED, setting, outcome)
        if outcome == {key: value}:
            return None
        if outcome is not None:
            return Note(Kind.RENAMED, setting, why if not row.nothing_at else "", outcome)
    elif row.to is not None:
        target = filled(row.to, match)
        return (
            Note(Kind.RENAMED, setting, why if not row.nothing_at else "", {target: value}) if target != key else None
        )
    if row.feature is not None:
        return Note(Kind.UNSUPPORTED, setting, filled(row.instead, match), feature=filled(row.feature, match))
    return None


def _became(ours: Any, target: str, match: re.Match[str]) -> dict[str, Any]:
    if isinstance(ours, dict):
        return {filled(key, match): value for key, value in ours.items()}
    return {target: ours}
