"""Kinds of tasks that a project may begin with: questions, a reward function to change, and answers that suit it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

EXACT_REWARD = '''"""The reward of a response: called once for each, in a process of its own."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 for exactly the expected text, else 0.0. A dict with "score" may have further values to log."""
    return float(solution_str.strip() == str(ground_truth).strip())
'''
MATH_REWARD = '''"""The reward of a response: called once for each, in a process of its own."""

import re


def last_number(text):
    """The last number of a text, without commas; "" if it has none."""
    return (re.findall(r"-?[0-9]+(?:[.][0-9]+)?", text.replace(",", "")) or [""])[-1]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 if the last number of the response is that of the expected answer, such as 42 of "#### 42", else 0.0.

    "pred" is what a majority votes with.
    """
    pred, expected = last_number(solution_str), last_number(str(ground_truth))
    right = bool(pred) and float(pred) == float(expected)
    return {"score": float(right), "acc": float(right), "pred": pred}
'''
SCORE_REWARD = '''"""The reward of a response: called once for each, in a process of its own."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Any number of any property of the text: here the share of its characters that are digits."""
    return sum(character in "0123456789" for character in solution_str) / max(1, len(solution_str))
'''
EXACT, MATH, SCORE, BUILT_IN_MATH = "exact", "math", "score", "built-in math"
NUMBER = re.compile(r"-?[0-9]+(?:[.][0-9]+)?")
ONE_NUMBER = re.compile(r"\s*[$]?\s*-?[0-9][0-9,]*(?:[.][0-9]+)?\s*[%.]?\s*")
GSM8K = "####"
"""GSM8K's mark before the number at the end of an answer."""
FORMULA = re.compile(r"\\boxed|\\[a-z]+\{|\\(?:pi|sqrt|infty|cup|cap|pm|circ)\b|\^|^\s*[(\[].*[)\]]\s*$|^\s*\$.*\$\s*$")
"""Expected answers that math-verify reads: LaTeX, powers, pairs and intervals."""
SHORT = 64
"""Characters of a text that a response may be expected to equal."""


@dataclass(frozen=True)
class TaskKind:
    """What a project begins with. about: one line. reward: the text of reward.py. question: draws one with its
    response.

    prompt_tokens, answer_tokens: limits, by bytes, which are at least as many as the tokens of any tokenizer.
    """

    about: str
    reward: str
    question: Callable[[random.Random], tuple[str, str]]
    prompt_tokens: int
    answer_tokens: int


def _word(draw: random.Random) -> tuple[str, str]:
    word = draw.choice(("river", "stone", "cloud", "light", "garden", "winter", "letter", "bridge"))
    return f"Write this word backwards, and nothing else: {word}", word[::-1]


def _sum(draw: random.Random) -> tuple[str, str]:
    first, second = draw.randint(10, 99), draw.randint(10, 99)
    return f"What is {first} + {second}? Think, and end with the number.", str(first + second)


def _free(draw: random.Random) -> tuple[str, str]:
    return f"Number {draw.randint(0, 999)}: ", ""


TASK_KINDS = {
    EXACT: TaskKind("a response must be exactly the expected text", EXACT_REWARD, _word, 128, 16),
    MATH: TaskKind("the last number of a response must be the expected one", MATH_REWARD, _sum, 128, 256),
    SCORE: TaskKind("a function of yours gives each response a score", SCORE_REWARD, _free, 32, 16),
}


def rows(kind: TaskKind, name: str, number: int, seed: int, is_chat: bool) -> list[dict[str, Any]]:
    """Draw questions as rows of a data file; is_chat: as messages for the chat template."""
    draw = random.Random(seed)
    made = []
    for _ in range(number):
        question, answer = kind.question(draw)
        prompt = [{"role": "user", "content": question}] if is_chat else question
        made.append({"data_source": f"mine/{name}", "prompt": prompt, "reward_model": {"ground_truth": answer}})
    return made


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
