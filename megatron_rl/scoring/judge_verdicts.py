"""Read verdicts: from a text to numbers, or to nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_rl.config.judge_keys import GROUP, PAIRWISE, JudgeConfig

YES_NO: Mapping[str, float] = {"yes": 1.0, "no": 0.0}
A_B: Mapping[str, float] = {"a": 1.0, "b": 0.0}
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?![\w.]*\d)", re.ASCII)
"""A number that stands alone."""


class VerdictReader:
    """Reads the verdicts of a judge with these keys."""

    def __init__(self, keys: JudgeConfig) -> None:
        self._mark, self._scale, self._is_group = keys.mark, keys.scale, keys.form == GROUP
        usual = A_B if keys.form == PAIRWISE else YES_NO
        self._words = {word.lower(): score for word, score in (keys.verdicts or usual).items()}
        longest_first = sorted(self._words, key=len, reverse=True)
        self._word = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")

    def __call__(self, text: str, number: int = 1) -> list[float] | None:
        """Return a score for each of `number` responses; None: the text has no verdict on them.

        One verdict is the first after the mark, or without a mark the last of the text. On a group it is all numbers
        there, as many as responses: scores, or without a scale the responses' numbers, the best first.
        """
        verdict = text
        if self._mark:
            _, mark, verdict = text.rpartition(self._mark)
            if not mark:
                return None
        if self._is_group:
            return self._of_group([float(each) for each in NUMBER.findall(verdict)], number)
        place = 0 if self._mark else -1
        if self._scale is None:
            words: list[str] = self._word.findall(verdict.lower())
            return [self._words[words[place]]] if words else None
        numbers = [self._scaled(float(each)) for each in NUMBER.findall(verdict)]
        known = numbers[place] if numbers else None
        return None if known is None else [known]

    def _of_group(self, numbers: list[float], number: int) -> list[float] | None:
        if len(numbers) != number:
            return None
        if self._scale is not None:
            scores = [self._scaled(each) for each in numbers]
            known = [score for score in scores if score is not None]
            return known if len(known) == number else None
        if sorted(numbers) != [float(each + 1) for each in range(number)]:
            return None
        ranks = {int(each) - 1: rank for rank, each in enumerate(numbers)}
        return [1.0 - ranks[each] / max(number - 1, 1) for each in range(number)]

    def _scaled(self, number: float) -> float | None:
        """A number of the scale as a score from 0 to 1; None outside of it."""
        assert self._scale is not None  # callers ask
        low, high = self._scale
        return (number - low) / (high - low) if low <= number <= high else None
