"""Rows go to their own teachers, and columns come back in the order of the batch. Teachers are functions here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_rl.config.distillation_keys import TeacherConfig
from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.config.role_kinds import KINDS
from megatron_rl.config.roles import TEACHER, RoleSpec
from megatron_rl.dispatch import Future
from megatron_rl.records import Batch, ragged, single_turn
from megatron_rl.scoring.sampled_batch import SampledBatch
from megatron_rl.scoring.teachers import TeacherCall, TeacherScorer

ROWS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
SAMPLED = [1, 1, 2]


def sampled(sources: list[str]) -> SampledBatch:
    number = torch.arange(len(sources))
    rows = single_turn(ragged([torch.tensor(row) for row in ROWS]), torch.tensor(SAMPLED))
    rows.add(index=number, uid=number, data_source=sources)
    return SampledBatch(1, rows)


def teacher(key: str | None, factor: float, asked: list[list[list[int]]]) -> TeacherCall:
    """Says `factor` times each sampled token, and notes the rows that it is asked about."""
    spec = RoleSpec(
        key or "all", KINDS[TEACHER], "t", "global_pool", "m", "t.model_path", MegatronConfig(), TeacherConfig(key)
    )

    def answer(batch: Batch) -> Future[Batch]:
        asked.append([row.tolist() for row in batch["input_ids"].unbind()])
        return Future.done(
            Batch(teacher_log_probs=batch.per_sampled_token(factor * batch.sampled_ids.values().float()))
        )

    return TeacherCall(spec, answer)


@pytest.mark.parametrize(
    ("sources", "numbers", "expected"),
    [
        (["a", "b", "a"], [0, 1, 0, 0], [5.0, 70.0, 10.0, 11.0]),
        (["b", "b", "b"], [1, 1, 1, 1], [50.0, 70.0, 100.0, 110.0]),
    ],
    ids=["both", "none of the first"],
)
def test_each_row_has_its_own_teacher(sources, numbers, expected):
    """A teacher without rows in a step is not asked. Would not catch a wrong source of a prompt."""
    asked: tuple[list, list] = ([], [])
    scorer = TeacherScorer([teacher("a", 1.0, asked[0]), teacher("b", 10.0, asked[1])], (), {})
    scorer.start(sampled(sources))
    columns = scorer.take()
    assert columns.flat("teachers").tolist() == numbers
    assert columns.flat("teacher_log_probs").tolist() == expected
    rows = [[row for row, source in zip(ROWS, sources, strict=True) if source == key] for key in "ab"]
    assert [calls[0] if calls else [] for calls in asked] == rows


def test_another_prompt_for_the_teacher():
    """Tokens before the first sampled one are replaced, and no others. Would not catch a prompt of another row."""
    asked: list[list[list[int]]] = []
    call = teacher(None, 1.0, asked)
    prompts = {0: torch.tensor([1, 2, 2]), 1: torch.tensor([1]), 2: torch.tensor([1, 1])}
    scorer = TeacherScorer([replace(call, spec=replace(call.spec, name="other"))], (), {"other": prompts})
    scorer.start(sampled(["x"] * 3))
    assert scorer.take().flat("teacher_log_probs").tolist() == [5.0, 7.0, 10.0, 11.0]
    assert asked == [[[1, 2, 2, 5], [1, 7], [1, 1, 10, 11]]]
