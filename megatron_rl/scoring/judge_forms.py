"""What a judge is asked about a batch, and how its verdicts become a score for each response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from megatron_rl.config.judge_keys import (
    CRITERION,
    GROUND_TRUTH,
    GROUP,
    PAIRWISE,
    QUESTION,
    RESPONSE,
    RESPONSE_A,
    RESPONSE_B,
    RESPONSES,
    RUBRIC,
)
from megatron_rl.config.reward_keys import scoring_key
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.plain_values import finite_number, quote
from megatron_rl.records import Conversation
from megatron_rl.scoring.outcome import Sample

RUBRIC_KEY = "rubric"
"""The entry of a row's extra_info that has its criteria."""
FENCE = "-----"
"""The line around each response of a group, longer where a response has it."""


class JudgedResponse(NamedTuple):
    """One response to judge. group: equal for the responses to one prompt."""

    question: str
    response: str
    ground_truth: str
    extra_info: Mapping[str, Any]
    group: int


@dataclass(frozen=True)
class Ask:
    """One question to a judge. places: place -> text. rows: the responses that the verdict is on. label: names the
    question next to its verdict; "" where a response has one alone.
    """

    places: dict[str, str]
    rows: tuple[int, ...]
    weight: float = 1.0
    label: str = ""


class RubricLine(NamedTuple):
    """One line of a rubric. weight: below 0 where a response should not do this."""

    text: str
    weight: float


def asks_of(form: str, cases: Sequence[JudgedResponse]) -> list[Ask]:
    """Return the questions about a batch. Raises RewardError for a row without a rubric, where the form needs one."""
    if form in (PAIRWISE, GROUP):
        groups: dict[int, list[int]] = {}
        for row, case in enumerate(cases):
            groups.setdefault(case.group, []).append(row)
        make = _pairs if form == PAIRWISE else _whole
        return [ask for rows in groups.values() for ask in make(cases, rows)]
    if form == RUBRIC:
        return [ask for row, case in enumerate(cases) for ask in _criteria(row, case)]
    return [Ask(_shared(case) | {RESPONSE: case.response}, (row,)) for row, case in enumerate(cases)]


def scores_of(form: str, asks: Sequence[Ask], verdicts: Sequence[Sequence[float]], num_rows: int) -> torch.Tensor:
    """Return float32 [num_rows]: the weighted mean of the verdicts on each response.

    verdicts: one list for each question, with one for each of its rows; a comparison has the share of the first. A
    response without comparisons has 0.5. Criteria of a weight below 0 do not count in the divisor.
    """
    total, weight = [0.0] * num_rows, [0.0] * num_rows
    for ask, verdict in zip(asks, verdicts, strict=True):
        values = (verdict[0], 1.0 - verdict[0]) if form == PAIRWISE else verdict
        for row, value in zip(ask.rows, values, strict=True):
            total[row] += ask.weight * value
            weight[row] += max(ask.weight, 0.0)
    means = [value / size if size else 0.5 for value, size in zip(total, weight, strict=True)]
    return torch.tensor(means, dtype=torch.float32)


def rubric_of(extra_info: Mapping[str, Any]) -> list[RubricLine]:
    """Return the criteria of a row: texts, or {criterion, weight}. Raises ValueError for anything else."""
    given = extra_info.get(RUBRIC_KEY)
    listed = list(given) if given is not None and not isinstance(given, str | Mapping) else []
    criteria = []
    for each in listed:
        entry = {CRITERION: each} if isinstance(each, str) else each
        text = entry.get(CRITERION) if isinstance(entry, Mapping) else None
        weight = finite_number(entry.get("weight", entry.get("points", 1.0))) if isinstance(entry, Mapping) else None
        if not isinstance(text, str) or not text.strip() or weight is None:
            raise ValueError(f"extra_info[{RUBRIC_KEY}] must be texts, or {{criterion, weight}}; it has {quote(each)}")
        criteria.append(RubricLine(text, weight))
    if not any(criterion.weight > 0 for criterion in criteria):
        raise ValueError(f"extra_info[{RUBRIC_KEY}] must have a criterion of a weight above 0; it is {quote(given)}")
    return criteria


class RubricRows(Protocol):
    """Prompts whose rows may have rubrics."""

    @property
    def rows(self) -> list[dict[str, Any]]: ...


def check_rubrics(config: RunConfig, prompts: Mapping[str, RubricRows]) -> None:
    """Raise ConfigError where a row that a judge with form=rubric scores has no rubric, or a damaged one.

    prompts: key of files -> their prompts.
    """
    for name, judge in config.judges.items():
        if judge.judge.form != RUBRIC:
            continue
        for key, dataset in prompts.items():
            scored = [row for row in dataset.rows if judge.scores_source(row["data_source"])]
            faults = {row["index"]: fault for row in scored if (fault := rubric_fault(row["extra_info"])) is not None}
            if faults:
                row, fault = next(iter(faults.items()))
                raise ConfigError(
                    f"{key}: {fault}, in row {row}; {len(faults)} of {len(scored)} rows have no rubric for "
                    f"{scoring_key(name)}.judge.form={RUBRIC}; try: criteria in every row, or "
                    f"{scoring_key(name)}.data_sources without such rows"
                )


def rubric_fault(extra_info: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the rubric of a row; None: nothing."""
    try:
        rubric_of(extra_info)
    except ValueError as error:
        return str(error)
    return None


def judged_response(prompt: Conversation, sample: Sample, group: int) -> JudgedResponse:
    """Return a response as a judge is shown it."""
    truth, info = str(sample.ground_truth), sample.extra_info or {}
    return JudgedResponse(question_text(prompt), sample.solution, truth, info, group)


def question_text(prompt: Conversation) -> str:
    """Return a prompt as text: the content of its only message, or every message under its role."""
    if isinstance(prompt, str):
        return prompt
    texts = [(str(message.get("role", "")), _content(message.get("content"))) for message in prompt]
    return texts[0][1] if len(texts) == 1 else "\n".join(f"{role}: {text}" for role, text in texts)


def _content(content: Any) -> str:
    """The text of a message, whose parts may be images, too."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def _shared(case: JudgedResponse) -> dict[str, str]:
    return {QUESTION: case.question, GROUND_TRUTH: case.ground_truth}


def _pairs(cases: Sequence[JudgedResponse], rows: Sequence[int]) -> list[Ask]:
    """Every two responses of a group in both orders: a judge may prefer a place."""
    return [
        Ask(
            _shared(cases[one]) | {RESPONSE_A: cases[one].response, RESPONSE_B: cases[other].response},
            (one, other),
            label=f"{first} against {second}",
        )
        for first, one in enumerate(rows, 1)
        for second, other in enumerate(rows, 1)
        if one != other
    ]


def _whole(cases: Sequence[JudgedResponse], rows: Sequence[int]) -> list[Ask]:
    texts = [cases[row].response for row in rows]
    fence = FENCE
    while any(fence in text for text in texts):
        fence += "-"
    listed = "\n".join(f"{number}.\n{fence}\n{text}\n{fence}" for number, text in enumerate(texts, 1))
    return [Ask(_shared(cases[rows[0]]) | {RESPONSES: listed}, tuple(rows))]


def _criteria(row: int, case: JudgedResponse) -> list[Ask]:
    try:
        rubric = rubric_of(case.extra_info)
    except ValueError as error:
        raise RewardError(f"{error}, of the prompt {quote(case.question)}") from None
    return [
        Ask(_shared(case) | {RESPONSE: case.response, CRITERION: each.text}, (row,), each.weight, each.text)
        for each in rubric
    ]
