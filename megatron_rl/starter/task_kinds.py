"""Kinds of tasks that a project may begin with: some questions, and a reward function to change. No torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EXACT = '''"""The reward of a response: called once for each, in a process of its own."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1.0 for exactly the expected text, else 0.0. A dict with "score" may have further values to log."""
    return float(solution_str.strip() == str(ground_truth).strip())
'''
MATH = '''"""The reward of a response: called once for each, in a process of its own."""

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
SCORE = '''"""The reward of a response: called once for each, in a process of its own."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Any number of any property of the text: here the share of its characters that are digits."""
    return sum(character in "0123456789" for character in solution_str) / max(1, len(solution_str))
'''


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
    "exact": TaskKind("a response must be exactly the expected text", EXACT, _word, 128, 16),
    "math": TaskKind("the last number of a response must be the expected one", MATH, _sum, 128, 256),
    "score": TaskKind("a function of yours gives each response a score", SCORE, _free, 32, 16),
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
