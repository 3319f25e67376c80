"""Which column of a user's file is the prompt and which the expected answer. Names and forms decide; no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron_rl.config.schema import GROUND_TRUTH
from megatron_rl.config.synonyms import ANSWERS, PROMPTS, SOURCES, TRUTHS, suggested_column
from megatron_rl.errors import ConfigError

PROMPT_OPTION, TRUTH_OPTION, NO_TRUTH = "--prompt-key", "--ground-truth-key", "none"
PARTS = {"instruction", "input"}
"""Two columns that make up a prompt together."""


@dataclass(frozen=True)
class ColumnChoice:
    """column: None where several would do, or none has a usual name. candidates: columns to choose from, the surest
    first.
    """

    column: str | None
    candidates: tuple[str, ...]

    @property
    def others(self) -> tuple[str, ...]:
        """The candidates that were not chosen."""
        return tuple(name for name in self.candidates if name != self.column)


def prompt_choice(forms: Mapping[str, str], answered: Collection[str], filled: Collection[str]) -> ColumnChoice:
    """Choose the column of prompts. forms: column -> form, see `column_forms`.

    answered: columns of conversations that end with the assistant's turn. filled: columns that are not empty in the
    first row.
    """
    usable = {
        name.lower(): name
        for name, form in forms.items()
        if form in ("text", "messages") and "." not in name and name not in answered
    }
    named = tuple(usable[name] for name in PROMPTS if name in usable)
    if usable.keys() >= PARTS:
        return ColumnChoice(None if usable["input"] in filled else usable["instruction"], named)
    if named:
        return ColumnChoice(named[0] if len(named) == 1 else None, named)
    rest = tuple(column for name, column in usable.items() if name not in {*ANSWERS, *SOURCES})
    return ColumnChoice(rest[0] if len(rest) == 1 else None, rest)


def truth_choice(forms: Mapping[str, str], prompt: str) -> ColumnChoice:
    """Choose the column of expected answers: verl's field, or the surest of those with a usual name."""
    if forms.get(GROUND_TRUTH, "null") != "null":
        return ColumnChoice(GROUND_TRUTH, (GROUND_TRUTH,))
    usable = {
        name.lower(): name
        for name, form in forms.items()
        if form in ("text", "number", "boolean", "texts", "numbers") and "." not in name and name != prompt
    }
    named = tuple(usable[name] for name in TRUTHS if name in usable)
    return ColumnChoice(named[0] if named else None, named or tuple(usable.values()))


def check_column(option: str, name: str, forms: Mapping[str, str], path: str, usual: Collection[str]) -> None:
    """Raise ConfigError for a column that an option names and that the file lacks."""
    if name not in forms:
        like = suggested_column(name, tuple(usual), list(forms))
        hint = "" if like is None else f"; did you mean: {option} {like}"
        raise ConfigError(f"{option} {name} must be a column of {path}; it has {listed(forms)}{hint}")


def listed(forms: Mapping[str, str]) -> str:
    """Return columns with their forms, as a list for people."""
    return ", ".join(f"{name} ({form})" for name, form in forms.items())
