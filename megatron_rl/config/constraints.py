"""Constraints on single values of the configuration. They stand on the field, inside of `Annotated`.

Bounds are those of `annotated_types` (Ge, Gt, Le); what these cannot say is declared here.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Annotated, Any, get_args, get_origin

from annotated_types import Ge, Gt, Le

from megatron_rl.config.problems import nearest_name
from megatron_rl.errors import Violation, shown


@dataclass(frozen=True)
class OneOf:
    """The value must be one of these names; in a list each element must be."""

    names: Collection[str]


@dataclass(frozen=True)
class Or:
    """A value outside of the bounds that is valid, and its meaning. It is also the value to suggest."""

    value: int | None
    meaning: str


@dataclass(frozen=True)
class AtMost:
    """The largest sensible integer of this key, in place of the limit for all keys. More is a typing error."""

    number: int


@dataclass(frozen=True)
class Nearest:
    """The suggestion in place of a value below the bounds: a value, or a function of the configuration."""

    value: Any | Callable[[Any], Any]

    def of(self, config: Any) -> Any:
        """The suggestion for a configuration."""
        return self.value(config) if callable(self.value) else self.value


@dataclass(frozen=True)
class IsPath:
    """The value names a file or a folder, or is a list of such names."""


@dataclass(frozen=True)
class Ours:
    """Verl has no key of this name. On a group: of any name in it. All other keys are verl's, with verl's meaning."""


OURS = Ours()

FilePath = Annotated[str, IsPath()]
Size = Annotated[int, Ge(1)]
Count = Annotated[int, Ge(0)]
NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
NumPrompts = Annotated[int, Ge(1), AtMost(10**6)]
UnitInterval = Annotated[float, Ge(0), Le(1)]


def longest_sequence(config: Any) -> int:
    """Tokens of the longest sequence, at least 1: a forward pass must have room for it."""
    longest: int = config.longest_sequence
    return max(1, longest)


PassTokens = Annotated[int, Ge(1), Nearest(longest_sequence)]


def is_finite(value: float) -> bool:
    """Whether a number is finite, as math.isfinite, also for integers of any length."""
    return isinstance(value, int) or math.isfinite(value)


@dataclass(frozen=True)
class Bounds:
    """Finite numbers from `low` to `high`. excludes_low: `low` itself does not belong to them."""

    low: float = -math.inf
    high: float = math.inf
    excludes_low: bool = False

    def holds(self, value: float) -> bool:
        """Whether `value` is inside; infinities and NaN never are."""
        above = value > self.low if self.excludes_low else value >= self.low
        return above and value <= self.high and is_finite(value)

    def rule(self, value: float) -> str:
        """The rule that a value outside breaks, as the rest of a sentence."""
        is_short = not is_finite(value) and not value > self.high
        return f"must be {'a finite number ' if is_short else ''}{self}".rstrip()

    def nearest(self, value: float, usual: float | None = None) -> float:
        """A valid value near `value`: a bound, or the `usual` value if no bound is near, as for NaN."""
        if value > self.high:
            return self.high
        if usual is not None and (self.excludes_low or not is_finite(value)) and self.holds(usual):
            return usual
        return self.low

    def __str__(self) -> str:
        limits = [] if math.isinf(self.low) else [f"{'>' if self.excludes_low else '>='} {shown(self.low)}"]
        return " and ".join([*limits, *([] if math.isinf(self.high) else [f"<= {shown(self.high)}"])])


@dataclass(frozen=True)
class Constraints:
    """The type of a field without its constraints, and the constraints."""

    kind: Any
    choices: Collection[str] | None = None
    bounds: Bounds | None = None
    other: Or | None = None
    most: int | None = None
    nearest: Nearest | None = None
    is_path: bool = False
    is_ours: bool = False

    def holds(self, value: Any) -> bool:
        """Whether a value that is not null keeps every constraint."""
        names = value if isinstance(value, list) else [value]
        if self.choices is not None and not all(name in self.choices for name in names):
            return False
        is_other = self.other is not None and value == self.other.value
        return self.bounds is None or is_other or self.bounds.holds(value)

    def violation(self, key: str, value: Any, usual: Any, config: Any) -> Violation:
        """The violation of a value for which `holds` is false. usual: the default of the key, to be suggested."""
        if self.choices is not None:
            names = value if isinstance(value, list) else [value]
            nearest = [name if name in self.choices else nearest_name(name, self.choices) for name in names]
            rule = f"must be one of {', '.join(self.choices)}"
            if isinstance(value, list):
                return Violation({key: value}, f"{rule}, each", {key: list(dict.fromkeys(nearest))}, wrong_name=True)
            return Violation({key: value}, rule, {key: nearest[0]}, wrong_name=True)
        bounds = self.bounds or Bounds()
        if self.other is not None:
            rule = f"must be {shown(self.other.value)} ({self.other.meaning}) or {bounds}"
            return Violation({key: value}, rule, {key: self.other.value})
        if self.nearest is not None and not value > bounds.high:
            return Violation({key: value}, bounds.rule(value), {key: self.nearest.of(config)})
        return Violation({key: value}, bounds.rule(value), {key: bounds.nearest(value, usual)})

    @property
    def is_number(self) -> bool:
        """Whether a value may be a number, or a list with numbers."""
        return "int" in str(self.kind) or "float" in str(self.kind)


def constraints_of(hint: Any) -> Constraints:
    """Read a type with `Annotated` in it. Numbers without bounds of their own must be finite."""
    kind, constraints = _bare(hint), {type(constraint): constraint for constraint in _metadata(hint)}
    low: float = -math.inf
    bounds = constraints.get(Bounds, Bounds() if kind in (float, float | None) else None)
    if constraints.keys() & {Ge, Gt, Le}:
        low = constraints[Gt].gt if Gt in constraints else constraints[Ge].ge if Ge in constraints else low
        bounds = Bounds(low, constraints[Le].le if Le in constraints else math.inf, Gt in constraints)
    return Constraints(
        kind,
        constraints[OneOf].names if OneOf in constraints else None,
        bounds,
        constraints.get(Or),
        constraints[AtMost].number if AtMost in constraints else None,
        constraints.get(Nearest),
        IsPath in constraints,
        Ours in constraints,
    )


def _is_union(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) or str(get_origin(hint)) == "typing.Union"


def _bare(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        return _bare(hint.__origin__)
    return reduce(or_, map(_bare, get_args(hint))) if _is_union(hint) else hint


def _metadata(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Annotated:
        yield from _metadata(hint.__origin__)
        yield from hint.__metadata__
    elif _is_union(hint):
        for member in get_args(hint):
            yield from _metadata(member)
