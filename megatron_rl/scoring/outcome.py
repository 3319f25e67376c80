"""What the reward function is told about one answer, what came of it, and the one call between the two. No torch."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

RewardFunction = Callable[..., Any]

FAILURES = ("raised", "timed_out", "crashed", "no_score")
"""How a sample can fail: an exception, no answer in time, the process died, a result that is not a score."""

LARGEST_SCORE = 3.4e38
"""Scores are float32 from here on."""

LONGEST_QUOTE = 200
LONGEST_REASON = 2000
LONGEST_TEXT = 100_000
"""Characters; of longer ones the middle is cut out."""

OWN_NAMES = frozenset(
    (
        *("reward", "rule_score", "rm_score", "rm_truncated"),
        *("input", "output", "gts", "step", "data_source", "failure", "score"),
    )
)
"""Names that metrics and sample tables give to numbers and texts of the program's."""
APART = "rule/"
"""What an entry of a returned dict has before its name where that name is the program's."""


class Sample(NamedTuple):
    """One answer and what its prompt's row says; all of it is sent to another process, so it must pickle."""

    data_source: str
    solution: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """A finite `score` with what else the function said, or a `failure` (one of FAILURES) with its reason.

    Neither where no function was asked.

    extras: the other entries of a returned dict that are finite numbers (as float) or strings, under names that are
    not the program's (`name_apart`).

    Every value is of exactly one of the types named here, never of a class of the user's.
    """

    score: float | None
    extras: dict[str, float | str] = field(default_factory=dict)
    failure: str = ""
    reason: str = ""


def failed(failure: str, reason: str) -> Outcome:
    """An outcome without a score."""
    return Outcome(None, failure=failure, reason=reason)


def score_sample(function: RewardFunction, sample: Sample, passing: tuple[type[BaseException], ...] = ()) -> Outcome:
    """Call `function` in verl's way. Whatever it raises, `sys.exit` too, and whatever it returns, is an outcome.

    passing: exceptions that are not the function's: they leave this one.
    """
    try:
        result = function(
            data_source=sample.data_source,
            solution_str=sample.solution,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
        )
        score = finite_number(result.get("score") if isinstance(result, dict) else result)
        extras = _extras(result) if isinstance(result, dict) else {}
    except passing:
        raise
    except BaseException as error:
        return failed("raised", f"the reward function raised {describe_error(error)}")
    if score is None or abs(score) > LARGEST_SCORE:
        rule = "it must return a finite number, or a dict with one under 'score'"
        return failed("no_score", f"the reward function returned {quote(result)}; {rule}")
    return Outcome(score, extras)


def finite_number(value: Any) -> float | None:
    """`value` as a float if it is a finite number of any library, else None; text is no number."""
    if value is None or isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value)
    except Exception:  # any library's way to say that it is none
        return None
    return number if math.isfinite(number) else None


def plain_text(text: str, longest: int = LONGEST_TEXT) -> str:
    """Exactly a str, cut in its middle, that any encoding of Unicode can write: lone surrogates as `\\udXXX`."""
    exact = str.__str__(text)
    if len(exact) > longest:
        exact = f"{exact[: longest // 2]}...{exact[-(longest // 2) :]}"
    return exact.encode("utf-8", "backslashreplace").decode()


def name_apart(name: str) -> str:
    """The name under which an entry of a returned dict is logged: its own, with APART before it where it is one of
    OWN_NAMES. Different names stay different.
    """
    return APART + name if name in OWN_NAMES or name.startswith(APART) else name


def describe_error(error: BaseException) -> str:
    """Name and message of an exception, which may be one of the user's that cannot be shown."""
    try:
        return plain_text(f"{type(error).__name__}: {error}", LONGEST_REASON)
    except BaseException:
        return f"{_type_name(error)}, which cannot be shown as text"


def describe(sample: Sample, prompt: int | None = None) -> str:
    """Which sample it is, for messages; `prompt` is its row number in the data, where that is known."""
    which = "a prompt" if prompt is None else f"prompt {prompt}"
    return f"{which} of data source {sample.data_source!r}, answer {quote(sample.solution)}"


def quote(value: object) -> str:
    """`repr(value)`, its middle cut out if it is long; its type where it cannot be shown."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = LONGEST_QUOTE
    try:
        return plain_text(shortener.repr(value), LONGEST_REASON)
    except BaseException:
        return f"an object of type {_type_name(value)}, which cannot be shown as text"


def _type_name(value: object) -> str:
    """Also where the class has hidden its name."""
    return plain_text(type.__dict__["__name__"].__get__(type(value)), LONGEST_QUOTE)


def _extras(result: dict[str, Any]) -> dict[str, float | str]:
    extras: dict[str, float | str] = {}
    for key, value in result.items():
        name = plain_text(str(key))
        content = plain_text(value) if isinstance(value, str) else finite_number(value)
        if name != "score" and content is not None:
            extras[name_apart(name)] = content
    return extras
