"""The response must be mathematically equal to the ground truth, as math-verify judges."""

from __future__ import annotations

import functools
import logging
from typing import Any

from megatron_rl.config.declarations import reward
from megatron_rl.scoring.built_in import Extra, Score, score_of

DATA_SOURCES = (
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
)
"""The names are verl's."""


@reward("math", data_sources=DATA_SOURCES, package="math_verify", requirement="math-verify[antlr4_13_2]")
def math_answer(data_source: str, solution_str: str, ground_truth: Any, extra_info: Extra = None) -> Score:
    r"""Right if the final answer is mathematically the ground truth: the last \boxed{}, LaTeX, or else the last number.

    The ground truth may be a whole solution that ends as GSM8K's do, `#### 42`, or as MATH's, in a \boxed{}. Raises
    ValueError for a ground truth that math-verify does not understand, with which no response could be right.
    """
    library = _math_verify()
    # The workers stop what takes too long; the library's own alarms would only add a second limit.
    truth = library.parse(final_answer(str(ground_truth)), parsing_timeout=None)
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r} is not a mathematical expression")
    # The library takes boxes that are near each other for one set, though a later one corrects an earlier one.
    last_box = max(solution_str.rfind("\\boxed"), 0)
    answer = library.parse(solution_str[last_box:], parsing_timeout=None)
    right = library.verify(truth, answer, timeout_seconds=None)
    return score_of(right, str(answer[0]) if answer else "")


def final_answer(truth: str) -> str:
    r"""Return the response of a ground truth in a \boxed{}: its last one, what follows GSM8K's mark, or all of it."""
    if "\\boxed" in truth:
        return truth[truth.rfind("\\boxed") :]
    return f"\\boxed{{{truth.rpartition('####')[2].strip()}}}"


@functools.cache
def _math_verify() -> Any:
    """The library, loaded with the first math answer; without its warning, at every call, that it has no alarm set."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify
