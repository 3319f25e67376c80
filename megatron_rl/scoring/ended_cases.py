"""Responses that have ended before their batch is complete, as a judge may already be asked about them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from megatron_rl.config.judge_keys import GROUP, PAIRWISE
from megatron_rl.scoring.judge_forms import JudgedResponse, judged_response
from megatron_rl.scoring.outcome import Sample
from megatron_rl.scoring.rule import Ended

MOST_GROUPS = 1 << 16
"""Groups without their last response; those with a failed episode never have it."""


class EndedCases:
    """Collects responses for one form of verdict. `add` may be called in any thread, `take` in one."""

    def __init__(self, form: str) -> None:
        self._whole_groups = form in (PAIRWISE, GROUP)
        self._ended: deque[Ended] = deque()
        self._groups: dict[int, dict[int, JudgedResponse]] = {}

    def add(self, answer: Ended) -> None:
        """Note a response that has ended."""
        if answer.group or not self._whole_groups:
            self._ended.append(answer)

    def take(self, sample_of: Callable[[Ended], Sample]) -> list[JudgedResponse]:
        """Return the responses that can be asked about, each once: with a form that compares, those of whole groups.

        sample_of: decodes a response.
        """
        cases: list[JudgedResponse] = []
        while self._ended:
            answer = self._ended.popleft()
            first = answer.group[0] if self._whole_groups else answer.number
            case = judged_response(answer.row["prompt"], sample_of(answer), first)
            if not self._whole_groups:
                cases.append(case)
                continue
            group = self._groups.setdefault(first, {})
            group[answer.number] = case
            if len(group) == len(answer.group):
                cases += [group[number] for number in answer.group]
                del self._groups[first]
        while len(self._groups) > MOST_GROUPS:
            del self._groups[next(iter(self._groups))]
        return cases
