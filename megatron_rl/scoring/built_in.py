"""Rule rewards that need no file of the user's: the exact answer, a mathematically equal one, or by data source.

Each returns a dict: "score" and "acc" 1.0 or 0.0, and "pred", the answer as it was understood, for majority votes.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterable
from typing import Any

from megatron_rl.config.problems import nearest_name
from megatron_rl.errors import ConfigError

Score = dict[str, float | str]
Extra = dict[str, Any] | None


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Extra = None) -> Score:
    """Right if the answer is the ground truth, letter for letter; blanks at both ends do not count."""
    answer = solution_str.strip()
    return _score(answer == str(ground_truth).strip(), answer)


def math(data_source: str, solution_str: str, ground_truth: Any, extra_info: Extra = None) -> Score:
    r"""Right if the final answer (in \boxed{}, LaTeX, or else the last number) is mathematically the ground truth.

    Raises ValueError for a ground truth that math-verify does not understand, with which no answer could be right.
    """
    library = _math_verify()
    # The workers stop what takes too long; the library's own alarms would only add a second limit.
    truth = library.parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r} is not a mathematical expression")
    answer = library.parse(solution_str, parsing_timeout=None)
    right = library.verify(truth, answer, timeout_seconds=None)
    return _score(right, str(answer[0]) if answer else "")


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Extra = None) -> Score:
    """The rule that BY_DATA_SOURCE names; raises KeyError for a source that is not there."""
    return BY_DATA_SOURCE[data_source](data_source, solution_str, ground_truth, extra_info)


BUILT_IN: dict[str, Callable[..., Score]] = {"compute_score": compute_score, "exact_match": exact_match, "math": math}
"""What `custom_reward_function.name` may be where its `path` is null."""

BY_DATA_SOURCE: dict[str, Callable[..., Score]] = {
    "demo/addition": exact_match,
    **dict.fromkeys(
        (
            "openai/gsm8k",
            "lighteval/MATH",
            "DigitalLearningGmbH/MATH-lighteval",
            "HuggingFaceH4/MATH-500",
            "math",
            "math_dapo",
            "math_dapo_reasoning",
            "aime",
            "aime24",
            "aime25",
            "aime2024",
            "aime2025",
            "hiyouga/geometry3k",
            "numina_aops_forum",
            "numina_synthetic_math",
            "numina_amc_aime",
            "numina_synthetic_amc",
            "numina_cn_k12",
            "numina_olympiads",
        ),
        math,
    ),
}
"""Data sources, under the names verl gives them, whose answers the built-in rules can judge."""


def check_built_in(name: str, data_sources: Iterable[str]) -> None:
    """Raise ConfigError if the rule `name` cannot judge a data source, or needs math-verify and it is not there."""
    rules = dict.fromkeys(data_sources, BUILT_IN[name])
    if name == "compute_score":
        unknown = sorted(rules.keys() - BY_DATA_SOURCE.keys())
        if unknown:
            raise ConfigError(
                f"no built-in reward judges data source {unknown[0]!r} (custom_reward_function.path is null): the "
                f"nearest is {nearest_name(unknown[0], BY_DATA_SOURCE)!r}; set custom_reward_function.path to a file "
                "of your own, or custom_reward_function.name to exact_match or math for all sources"
            )
        rules = {source: BY_DATA_SOURCE[source] for source in rules}
    if math in rules.values() and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "the built-in math reward needs the package math-verify, and it is not installed: "
            "pip install 'math-verify[antlr4_13_2]', or use custom_reward_function.name=exact_match"
        )


def _score(right: bool, answer: str) -> Score:
    return {"score": float(right), "acc": float(right), "pred": answer}


@functools.cache
def _math_verify() -> Any:
    """The library, loaded with the first math answer; without its warning, at every call, that it has no alarm set."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify
