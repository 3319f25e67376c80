"""Report all problems of a configuration at once, and find the valid name, number or file to suggest."""

from __future__ import annotations

import difflib
import heapq
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from megatron_rl.config.file_kinds import instead_of_file
from megatron_rl.errors import ConfigError, Violation


def raise_problems(headline: str, violations: Sequence[Violation], kind: str = "problems") -> None:
    """Raise one ConfigError that lists every violation, numbered if there are several. Return if there are none.

    kind: what several of them are called.
    """
    if len(violations) == 1:
        raise ConfigError(f"{headline}: {violations[0]}", violations)
    if violations:
        lines = [f"  {number}. {violation}" for number, violation in enumerate(violations, start=1)]
        raise ConfigError("\n".join([f"{headline}: {len(violations)} {kind}", *lines]), violations)


def refused(violation: Violation) -> ConfigError:
    """A ConfigError with one violation."""
    return ConfigError(str(violation), [violation])


def violations_of(error: ConfigError) -> list[Violation]:
    """The violations of an error. An error with a text alone gives one violation without settings."""
    return list(error.violations) or [Violation({}, str(error))]


def without_echoes(violations: Sequence[Violation], follows: Mapping[str, str]) -> list[Violation]:
    """Merge inherited violations into their source key's, which then names both keys.

    follows: key -> the key whose value it has until it is set.
    """
    kept = list(violations)
    for leader in violations:
        echoes = [other for other in kept if other is not leader and _is_echo(other, leader, follows)]
        # A leader that itself follows another key may have joined that one's before.
        if not echoes or not any(other is leader for other in kept):
            continue
        together = [other for other in kept if other is leader or other in echoes]
        place = kept.index(together[0])
        kept = [other for other in kept if other is not leader and other not in echoes]
        joined = leader
        for echo in echoes:
            joined = _joined(joined, echo)
        kept.insert(place, joined)
    return kept


def _is_echo(echo: Violation, leader: Violation, follows: Mapping[str, str]) -> bool:
    if not echo.settings or not leader.settings or (echo.rule, echo.hint) != (leader.rule, leader.hint):
        return False
    first, *_ = leader.settings
    value, nearest = leader.settings[first], leader.nearest.get(first)
    # By their text, as NaN is not equal to itself.
    return all(
        repr((given, echo.nearest.get(key))) == repr((value, nearest)) and first in _leaders(key, follows)
        for key, given in echo.settings.items()
    )


def _leaders(key: str, follows: Mapping[str, str]) -> Iterator[str]:
    while key in follows:
        key = follows[key]
        yield key


def _joined(leader: Violation, echo: Violation) -> Violation:
    first, *_ = leader.settings
    nearest = dict.fromkeys(echo.settings, leader.nearest[first]) if first in leader.nearest else {}
    return replace(leader, settings=leader.settings | echo.settings, nearest=leader.nearest | nearest)


MOST_COMPARED = 1000
"""Names that are compared letter by letter with another. Folders and tables of users may have any number."""
LONGEST_COMPARED = 200
"""Letters of a name that are compared: the time grows with the product of two lengths."""


def nearest_name(name: str, names: Iterable[str]) -> str:
    """Return the name most like `name`; `names` must not be empty.

    In dotted names the last part and shared parts count as much as the whole, so that `rollout.n` finds
    `actor_rollout_ref.rollout.n`. Of more than MOST_COMPARED names only those with the longest equal ends are compared.
    """
    parts = name.split(".")

    def likeness(other: str) -> float:
        others = other.split(".")
        shared = len(set(parts) & set(others)) / len(set(parts))
        return shared + _likeness(name, other) + _likeness(parts[-1], others[-1])

    candidates = list(names)
    if len(candidates) > MOST_COMPARED:
        candidates = heapq.nlargest(MOST_COMPARED, candidates, key=lambda other: _equal_ends(name, other))
    return max(candidates, key=likeness)


def _equal_ends(left: str, right: str) -> int:
    """Return how many letters are equal at the start and at the end."""
    left, right = left[:LONGEST_COMPARED], right[:LONGEST_COMPARED]
    return len(os.path.commonprefix([left, right])) + len(os.path.commonprefix([left[::-1], right[::-1]]))


ALIKE = 0.75
"""Share of two words that must be equal, in order, for one to count as a misspelling of the other."""


def like_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name that `name` misspells or shortens, or None.

    Every part of a dotted name must be like a part of the other name, and the last part like the last. Words joined by
    `_` are compared word by word, so that another word is no misspelling.
    """
    if len(name) > LONGEST_COMPARED:
        return None
    candidates = [other for other in names if _is_slip(name, other)]
    return nearest_name(name, candidates) if candidates else None


def _is_slip(name: str, other: str) -> bool:
    (above, words), (others_above, others) = _words(name), _words(other)
    if "".join(words) != "".join(others):
        # What is left out may be half of the words, and no word may stand for two.
        if not len(words) <= len(others) <= 2 * len(words) + 1:
            return False
        if not all(any(_are_alike(word, other) for other in others) for word in words):
            return False
    return all(any(_are_alike(part, other) for other in others_above) for part in above)


@lru_cache(maxsize=1 << 12)
def _words(name: str) -> tuple[list[str], list[str]]:
    """Split a dotted name into the parts above the last one, and the words of the last one."""
    *above, last = name.split(".")
    return above, last.split("_")


@lru_cache(maxsize=1 << 16)
def _are_alike(left: str, right: str) -> bool:
    """Return whether two words are equal in ALIKE of their letters. The lengths alone mostly say that they are not."""
    if 2 * min(len(left), len(right)) < ALIKE * (len(left) + len(right)):
        return False
    return _likeness(left, right) >= ALIKE


def missing_file(key: str, path: str, file: Path, suffixes: Sequence[str]) -> Violation:
    """The violation of a `key` that names no file of these kinds, with the most similar file name in its folder."""
    kind, folder = " or ".join(suffixes), file if file.is_dir() else file.parent
    there_is = instead_of_file(file)
    neighbours = [str(other) for suffix in suffixes for other in folder.glob(f"*{suffix}") if other.is_file()]
    nearest = {key: nearest_name(str(file), neighbours)} if neighbours else {}
    hint = "" if neighbours else f"{folder} holds none"
    return Violation({key: path}, f"must be a {kind} file, and {there_is}", nearest, hint, wrong_name=True)


def nearest_number(value: float, numbers: Iterable[int]) -> int:
    """The number closest to `value`, the smaller of two equally close ones. `numbers` must not be empty."""
    return min(sorted(numbers), key=lambda number: abs(number - value))


def divisors(number: int) -> list[int]:
    """All divisors of a number >= 1, in order."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def _likeness(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left[:LONGEST_COMPARED], right[:LONGEST_COMPARED]).ratio()
