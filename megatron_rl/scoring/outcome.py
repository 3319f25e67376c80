"""One call of the reward function: its arguments (`Sample`), the call, and its result (`Outcome`). No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_rl.plain_values import describe_error, finite_number, line_of_user, plain_text, quote

RewardFunction = Callable[..., Any]

FAILURES = ("raised", "timed_out", "crashed", "no_score")
"""How a sample can fail: an exception, no result in time, a dead process, a result that is not a score."""

LARGEST_SCORE = 3.4e38
"""Scores are float32 from here on."""

OWN_NAMES = frozenset(
    (
        *("reward", "rule_score", "rm_score", "rm_truncated"),
        *("input", "output", "gts", "step", "data_source", "failure", "score"),
    )
)
"""Names of the program's own entries in metrics and sample tables."""
APART = "rule/"
"""The prefix of a returned entry whose name is one of the program's own."""


class Sample(NamedTuple):
    """One response and the columns of its prompt's row. It is sent to another process, so it must pickle."""

    data_source: str
    solution: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """A finite `score` with the function's other entries, or a `failure` (one of FAILURES) with its reason.

    Both are missing where no function was called. extras: the other entries of a returned dict that are finite numbers
    (as float) or strings, under names that are not the program's (`name_apart`). Every value is of exactly one of the
    types named here, never of a class of the user's.
    """

    score: float | None
    extras: dict[str, float | str] = field(default_factory=dict)
    failure: str = ""
    reason: str = ""


def failed(failure: str, reason: str) -> Outcome:
    """Return an outcome without a score."""
    return Outcome(None, failure=failure, reason=reason)


def score_sample(function: RewardFunction, sample: Sample, passing: tuple[type[BaseException], ...] = ()) -> Outcome:
    """Call `function` in verl's way. Everything that it returns or raises, `sys.exit` too, becomes an outcome.

    passing: exceptions to let through, because they are not the function's.
    """
    try:
        return outcome_of(_called(function, sample))
    except passing:
        raise
    except BaseException as error:
        return raised(error)


async def score_sample_later(
    function: RewardFunction, sample: Sample, passing: tuple[type[BaseException], ...] = ()
) -> Outcome:
    """Call an `async` function and wait for it. Arguments and outcome are those of `score_sample`."""
    try:
        return outcome_of(await _called(function, sample))
    except passing:
        raise
    except BaseException as error:
        return raised(error)


def _called(function: RewardFunction, sample: Sample) -> Any:
    return function(
        data_source=sample.data_source,
        solution_str=sample.solution,
        ground_truth=sample.ground_truth,
        extra_info=sample.extra_info,
    )


def raised(error: BaseException) -> Outcome:
    """Return the outcome of a call that has raised."""
    return failed("raised", f"the reward function raised {describe_error(error)}{line_of_user(error)}")


def outcome_of(result: Any) -> Outcome:
    """Return what a function has returned for a response as an outcome; a dict of the user's may raise anything."""
    score = finite_number(result.get("score") if isinstance(result, dict) else result)
    extras = _extras(result) if isinstance(result, dict) else {}
    if score is None or abs(score) > LARGEST_SCORE:
        rule = "it must return a finite number, or a dict with one under 'score'"
        return failed("no_score", f"the reward function returned {quote(result)}; {rule}")
    return Outcome(score, extras)


def name_apart(name: str) -> str:
    """Return the name under which an entry of a returned dict is logged: with the prefix APART if it is in OWN_NAMES.

    Different names stay different.
    """
    return APART + name if name in OWN_NAMES or name.startswith(APART) else name


def describe(sample: Sample, prompt: int | None = None) -> str:
    """Name a sample in a message. prompt: its row number in the data, where that is known."""
    which = "a prompt" if prompt is None else f"prompt {prompt}"
    return f"{which} of data source {sample.data_source!r}, response {quote(sample.solution)}"


def _extras(result: dict[str, Any]) -> dict[str, float | str]:
    extras: dict[str, float | str] = {}
    for key, value in result.items():
        name = plain_text(str(key))
        content = plain_text(value) if isinstance(value, str) else finite_number(value)
        if name != "score" and content is not None:
            extras[name_apart(name)] = content
    return extras
