"""Everything that is wrong with a configuration at once, and the nearest thing that would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_rl.errors import ConfigError


def raise_problems(headline: str, problems: Sequence[str]) -> None:
    """Raise one ConfigError that lists every problem, numbered when there are several; nothing when there is none."""
    if len(problems) == 1:
        raise ConfigError(f"{headline}: {problems[0]}")
    if problems:
        lines = [f"  {number}. {problem}" for number, problem in enumerate(problems, start=1)]
        raise ConfigError("\n".join([f"{headline}: {len(problems)} problems", *lines]))


def nearest_name(name: str, names: Iterable[str]) -> str:
    """The name most like `name`; `names` must not be empty.

    Of dotted names the last part and shared parts count as much as the whole, so that `rollout.n` finds
    `actor_rollout_ref.rollout.n`.
    """
    parts = name.split(".")

    def likeness(other: str) -> float:
        others = other.split(".")
        shared = len(set(parts) & set(others)) / len(set(parts))
        return shared + _likeness(name, other) + _likeness(parts[-1], others[-1])

    return max(names, key=likeness)


def nearest_file(file: Path, suffixes: Sequence[str]) -> str:
    """The end of a message about a file that is not there: the one beside it, of these kinds, whose name is nearest."""
    neighbours = [str(other) for suffix in suffixes for other in file.parent.glob(f"*{suffix}")]
    return f"nearest: {nearest_name(str(file), neighbours)}" if neighbours else f"{file.parent} holds none"


def nearest_number(value: float, numbers: Iterable[int]) -> int:
    """The number closest to `value`, the smaller of two equally close ones. `numbers` must not be empty."""
    return min(sorted(numbers), key=lambda number: abs(number - value))


def _likeness(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()
