"""Everything that is wrong with a configuration at once, and the nearest thing that would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from megatron_rl.errors import ConfigError


def raise_problems(headline: str, problems: Sequence[str]) -> None:
    """Raise one ConfigError that lists every problem, numbered when there are several; nothing when there is none."""
    if len(problems) == 1:
        raise ConfigError(f"{headline}: {problems[0]}")
    if problems:
        lines = [f"  {number}. {problem}" for number, problem in enumerate(problems, start=1)]
        raise ConfigError("\n".join([f"{headline}: {len(problems)} problems", *lines]))


def nearest_name(name: str, names: Iterable[str]) -> str:
    """The name most like `name`. For dotted names the last part counts as much as the whole, so that `rollout.n` finds
    `actor_rollout_ref.rollout.n`. `names` must not be empty.
    """
    last = name.rpartition(".")[2]
    return max(names, key=lambda other: _likeness(name, other) + _likeness(last, other.rpartition(".")[2]))


def nearest_number(value: float, numbers: Iterable[int]) -> int:
    """The number closest to `value`, the smaller of two equally close ones. `numbers` must not be empty."""
    return min(sorted(numbers), key=lambda number: abs(number - value))


def _likeness(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()
