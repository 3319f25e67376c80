"""Which earlier answers a request names, whenever it begins, and what a checkpoint keeps of them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.errors import ConfigError
from megatron_rl.records import ragged, single_turn
from megatron_rl.sampling.response_history import EARLIER_FILE, ResponseHistory

CONTEXT = 2


def batch_of(answers: list[list[int]]):
    """Rows whose prompt is 7, 8, 9."""
    rows = ragged([torch.tensor([7, 8, 9, *answer]) for answer in answers])
    return single_turn(rows, torch.tensor([len(answer) for answer in answers]))


def named(earlier: ResponseHistory, prompt: int, batch: int) -> list[list[int]]:
    """The answers that a request names, without the prompt's tokens before them."""
    answers = [np.frombuffer(answer, dtype=np.int32).tolist() for answer in earlier.of(prompt, batch)]
    assert all(answer[:CONTEXT] == [8, 9] for answer in answers)
    return [answer[CONTEXT:] for answer in answers]


def expected(done: list[tuple[int, int, list[int]]], prompt: int, last_step: int, num_kept: int) -> list[list[int]]:
    """Of (step, prompt, answer): the last different ones up to a step."""
    answers: list[list[int]] = []
    for _, _, answer in reversed([row for row in done if row[0] <= last_step and row[1] == prompt and row[2]]):
        if answer not in answers and len(answers) < num_kept:
            answers.insert(0, answer)
    return answers


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.randoms(use_true_random=False))
def test_a_batch_names_the_same_whenever_it_begins(num_kept: int, ahead: int, draw: Random) -> None:
    """After every step, batches that may have begun name what was there `ahead` steps before them: also those that
    begin again after a save and a resume at this step or the one before it, and after a step that is given up and
    taken again. An answer of an episode that failed is never there.

    Would not catch a batch that begins too early: the schedule's own tests do.
    """
    new, done = ResponseHistory(num_kept, CONTEXT, ahead), []
    kept = new
    for step in range(1, 13):
        prompts = [draw.randrange(3) for _ in range(4)]
        answers = [[draw.randrange(3) for _ in range(draw.randrange(3))] for _ in prompts]
        for _ in range(draw.randrange(1, 3)):
            kept.add(step, torch.tensor(prompts), batch_of(answers))
        done += [(step, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        for saved in (step - 1, step):
            resumed = ResponseHistory(num_kept, CONTEXT, ahead)
            resumed.load_tensors(kept.tensors(saved))
            for batch in range(saved + 1, saved + 2 + ahead):
                for prompt in range(3):
                    answers_then = expected(done, prompt, batch - 1 - ahead, num_kept)
                    assert named(kept, prompt, batch) == named(resumed, prompt, batch) == answers_then
        kept = draw.choice((kept, resumed))


def test_no_more_is_kept_than_is_named() -> None:
    """After many steps, of each prompt the last answers and those of the steps that later batches name.

    Would not catch the memory of long answers, which the number of answers bounds.
    """
    earlier = ResponseHistory(num_kept=2, num_context=CONTEXT, ahead=1)
    for step in range(1, 30):
        earlier.add(step, torch.tensor([0] * 4 + [step]), batch_of([[step, row] for row in range(5)]))
    rows = earlier.tensors(29)["answers"]
    assert sorted(rows[rows[:, 0] == 0][:, 1].tolist()) == [27] * 2 + [28] * 4 + [29] * 4
    assert earlier.tensors(29)["token_ids"].dtype == torch.int32


def test_a_checkpoint_keeps_them(tmp_path) -> None:
    """Equal after a file; a folder without one has none; a damaged file is named.

    Would not catch a file that lists other bytes for its tensors: its digest in the manifest does.
    """
    earlier, resumed = ResponseHistory(4, CONTEXT, 0), ResponseHistory(4, CONTEXT, 0)
    resumed.read(tmp_path)
    assert resumed.of(0, 2) == ()
    earlier.add(1, torch.tensor([0, 0, 5]), batch_of([[1], [2, 3], [4]]))
    earlier.write(tmp_path, 1)
    resumed.read(tmp_path)
    assert resumed.of(0, 2) == earlier.of(0, 2) and named(resumed, 0, 2) == [[1], [2, 3]]
    assert named(resumed, 5, 2) == [[4]] and named(resumed, 5, 1) == []
    (tmp_path / EARLIER_FILE).write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=EARLIER_FILE):
        ResponseHistory(4, CONTEXT, 0).read(tmp_path)
