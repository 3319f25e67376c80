"""From examples to the records that roles learn from: hand-computed rows, masks and lengths."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.config.schema import RunConfig
from megatron_rl.config.task_config import TaskConfig, for_task
from megatron_rl.config.tasks import DPO
from megatron_rl.data.reading import Example, Labelled, Ranking, ScoredExample, token_batch
from megatron_rl.data.row_problems import RowPlace
from megatron_rl.errors import ConfigError
from megatron_rl.records import answer_rows
from megatron_rl.tasks.task_data import check_lengths
from megatron_rl.tasks.training_records import mismatched, preference_batch, reward_batch

HERE = RowPlace("file.jsonl", 0)


def example(tokens: list[int], counted: list[int], prompt: int = 0) -> Example:
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    mask[counted] = True
    return Example(torch.tensor(tokens), mask, HERE, prompt)


def rows(ragged: torch.Tensor) -> list[list]:
    return [row.tolist() for row in ragged.unbind()]


def test_what_comes_after_the_last_counted_token_is_left_out() -> None:
    """Two turns of which the second ends before the row does. Would not catch a wrong mask in the file's reader."""
    batch = token_batch([example([5, 6, 7, 8, 9, 10], [2, 4]), example([1, 2], [1])])
    assert rows(batch["input_ids"]) == [[5, 6, 7, 8, 9], [1, 2]]
    assert rows(batch["sampled"]) == [[False, False, True, False, True], [False, True]]


def test_an_example_without_a_counted_token_is_named() -> None:
    """Would not catch one that the reader has let through with a token that should not count."""
    with pytest.raises(ValueError, match=r"file\.jsonl: row 0: no token counts"):
        token_batch([example([1, 2], [])])


def test_a_reward_model_reads_one_token_more() -> None:
    """Of three ranked answers, and of one with a score. Would not catch a wrong order in the file."""
    answers = tuple(example([1, 2, *tail], [2], prompt=2) for tail in ([3], [4, 5], [6]))
    batch = reward_batch([Ranking(answers, (0.5, 1.0), HERE)])
    assert rows(batch["input_ids"]) == [[1, 2, 3, 0, 1, 2, 4, 5, 0, 1, 2, 6, 0]]
    assert rows(batch["answer_lengths"]) == [[4, 5, 4]] and answer_rows(batch).num_sampled.tolist() == [2, 3, 2]
    assert rows(answer_rows(batch)["sampled"]) == [[False] * 2 + [True] * number for number in (2, 3, 2)]
    assert rows(batch["given"]) == [[0.5, 1.0, 0.0]] and batch["weights"].tolist() == [1.0]
    one = reward_batch([ScoredExample(answers[1], 0.25, HERE)])
    assert rows(one["given"]) == [[0.25]] and rows(one["answer_lengths"]) == [[5]]
    assert rows(answer_rows(batch)["input_ids"]) == [[1, 2, 3, 0], [1, 2, 4, 5, 0], [1, 2, 6, 0]]


def test_preferences_score_what_counts_after_the_prompt() -> None:
    """Pairs, and a labelled answer without a prompt. Would not catch a prompt that the answers do not share."""
    pair = Ranking((example([1, 2, 3], [2], 2), example([1, 2, 4, 5], [2, 3], 2)), (0.0,), HERE)
    batch = preference_batch([pair])
    assert rows(batch["sampled"]) == [[False, False, True, False, False, True, True]]
    assert rows(batch["labels"]) == [[0.0, 0.0]]
    labelled = preference_batch([Labelled(example([7, 8], [1]), True, HERE)])
    assert answer_rows(labelled).num_sampled.tolist() == [1] and rows(labelled["labels"]) == [[1.0]]


def test_mismatched_answers_are_the_next_record_s() -> None:
    """Cut to the longest row. Would not catch two records with the same prompt, which the next test has."""
    records = [
        Labelled(example([1, 2, 3], [2], 2), True, HERE),
        Labelled(example([4, 5, 6, 7], [2, 3], 2), False, HERE),
    ]
    first, second = mismatched(records, max_length=3)
    assert first.example.tokens.tolist() == [1, 2, 6] and first.example.loss_mask.tolist() == [False, False, True]
    assert second.example.tokens.tolist() == [4, 5, 3] and second.example.prompt_length == 2


@pytest.mark.parametrize(
    ("prompts", "answers"),
    [
        pytest.param([1, 2, 3], [1, 2, 0], id="no two alike: the next record's"),
        pytest.param([1, 1, 2, 2, 3, 3], [2, 3, 4, 5, 0, 1], id="pairs"),
        pytest.param([1, 2, 1], [1, 2, 1], id="first and last alike, one left to compare with"),
        pytest.param([1, 1, 1, 2, 3], [3, 4, 3, 1, 2], id="more than half alike"),
        pytest.param([5, 7, 5, 6, 7, 6], [1, 3, 4, 0, 5, 2], id="scattered"),
    ],
)
def test_a_mismatched_answer_is_never_to_the_same_prompt(prompts: list[int], answers: list[int]) -> None:
    """Token 10 + i is the answer of record i, and the prompt's own token is first. By hand: records sorted by prompt,
    shifted by the size of the largest group. Would not catch two ways of writing one prompt, which are two prompts.
    """
    records = [Labelled(example([prompt, 10 + i], [1], 1), True, HERE) for i, prompt in enumerate(prompts)]
    pairs = mismatched(records, max_length=2)
    assert [pair.example.tokens.tolist() for pair in pairs] == [
        [a, 10 + b] for a, b in zip(prompts, answers, strict=True)
    ]
    assert all(prompts[other] != own for own, other in zip(prompts, answers, strict=True))


def test_answers_to_one_prompt_have_none_to_compare_with() -> None:
    """Would not catch it after ranks have started; `TaskData` asks before."""
    records = [Labelled(example([1, 2, 3 + i], [2], 2), True, HERE) for i in range(2)]
    with pytest.raises(
        ConfigError, match=r"file\.jsonl: row 0: .* all 2 labelled responses have the same prompt; try: files with two"
    ):
        mismatched(records, max_length=3)


def test_a_row_that_fills_up_has_no_weight() -> None:
    """Would not catch a role that reads it all the same, which the layouts' parity does."""
    batch = reward_batch([ScoredExample(example([1, 2], [1], 1), 1.0, HERE)])
    assert batch.neutral()["weights"].tolist() == [0.0] and batch["weights"].tolist() == [1.0]


@pytest.mark.parametrize(("ranks", "tokens", "refused"), [(1, 20, None), (1, 19, "20"), (2, 12, None), (2, 10, "12")])
def test_responses_that_share_a_micro_batch_fit(ranks: int, tokens: int, refused: str | None) -> None:
    """Of 9 and 11 tokens: cut over two ranks each is filled up to 12. Would not catch a reward model's further one."""
    config = for_task(RunConfig(), DPO)
    assert isinstance(config, TaskConfig)
    actor = config.actor_rollout_ref.actor
    actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu = True, tokens
    actor.megatron.context_parallel_size = ranks
    pair = Ranking((example([1] * 9, [8], 2), example([1] * 11, [10], 2)), (0.0,), HERE)
    if refused is None:
        check_lengths(config, [pair])
        return
    with pytest.raises(ConfigError, match=f"try: .*ppo_max_token_len_per_gpu={refused}$"):
        check_lengths(config, [pair])
