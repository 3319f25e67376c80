"""What a user's expected answers look like, and so which reward function suits them. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

EXACT, MATH, BUILT_IN_MATH = "exact", "math", "built-in math"
NUMBER = re.compile(r"-?[0-9]+(?:[.][0-9]+)?")
ONE_NUMBER = re.compile(r"\s*[$]?\s*-?[0-9][0-9,]*(?:[.][0-9]+)?\s*[%.]?\s*")
GSM8K = "####"
"""GSM8K's mark before the number at the end of an answer."""
FORMULA = re.compile(r"\\boxed|\\[a-z]+\{|\\(?:pi|sqrt|infty|cup|cap|pm|circ)\b|\^|^\s*[(\[].*[)\]]\s*$|^\s*\$.*\$\s*$")
"""Expected answers that math-verify reads: LaTeX, powers, pairs and intervals."""
SHORT = 64
"""Characters of a text that a response may be expected to equal."""


def last_number(text: str) -> str | None:
    """Return the last number of a text, without commas; None where it has none. The reward function does the same."""
    numbers = NUMBER.findall(text.replace(",", ""))
    return numbers[-1] if numbers else None


def is_gsm8k(truth: Any) -> bool:
    """Return whether an answer ends as GSM8K's do: reasoning, then `#### 42`."""
    return isinstance(truth, str) and GSM8K in truth and ONE_NUMBER.fullmatch(truth.rpartition(GSM8K)[2]) is not None


def suited_kind(truths: Sequence[Any]) -> str | None:
    """Return `EXACT`, `MATH` or `BUILT_IN_MATH`; None where the texts leave it open."""
    if not truths:
        return None
    if all(_is_number(truth) or is_gsm8k(truth) for truth in truths):
        return MATH
    texts = [truth for truth in truths if isinstance(truth, str)]
    if len(texts) < len(truths):
        return None
    if any(FORMULA.search(text) for text in texts) and all(_is_formula(text) for text in texts):
        return BUILT_IN_MATH
    return EXACT if all(len(text) <= SHORT and "\n" not in text.strip() for text in texts) else None


def _is_number(truth: Any) -> bool:
    if isinstance(truth, str):
        return ONE_NUMBER.fullmatch(truth) is not None
    return isinstance(truth, int | float) and not isinstance(truth, bool)


def _is_formula(text: str) -> bool:
    return "\\boxed" in text or (len(text) <= SHORT and (last_number(text) is not None or bool(FORMULA.search(text))))
