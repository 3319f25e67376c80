"""Projects to begin with: questions, rewards and layouts, without a run (tests/e2e/test_first_hour.py has one)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.cli.starting import KindName
from megatron_rl.errors import ConfigError
from megatron_rl.starter.project import layouts, write_project
from megatron_rl.starter.task_kinds import TASK_KINDS, rows

SHAPES = Path(__file__).parents[2] / "configs/models"


def reward_of(name: str):
    """The reward function of a kind."""
    scope: dict = {}
    exec(TASK_KINDS[name].reward, scope)
    return scope["compute_score"]


def test_the_command_names_every_kind() -> None:
    assert [kind.value for kind in KindName] == list(TASK_KINDS)


@pytest.mark.parametrize(
    ("name", "answer", "truth", "expected"),
    [
        ("exact", " revir\n", "revir", 1.0),
        ("exact", "river", "revir", 0.0),
        ("math", "12 + 30 is 42.", "42", {"score": 1.0, "acc": 1.0, "pred": "42"}),
        ("math", "1,042.0", "1042", {"score": 1.0, "acc": 1.0, "pred": "1042.0"}),
        ("math", "I do not know", "42", {"score": 0.0, "acc": 0.0, "pred": ""}),
        ("score", "a1b2", "", 0.5),
        ("score", "", "", 0.0),
    ],
)
def test_rewards_by_hand(name: str, answer: str, truth: str, expected: object) -> None:
    assert reward_of(name)("mine", answer, truth) == expected


@pytest.mark.parametrize("name", TASK_KINDS)
def test_questions_are_drawn_again_alike_and_fit(name: str) -> None:
    """A seed gives the same questions again, another seed gives others. Chats are messages. None exceeds its limit."""
    first = rows(TASK_KINDS[name], name, 64, 1, is_chat=True)
    assert (
        first == rows(TASK_KINDS[name], name, 64, 1, is_chat=True) != rows(TASK_KINDS[name], name, 64, 2, is_chat=True)
    )
    texts = [row["prompt"][0]["content"] for row in first]
    assert texts == [row["prompt"] for row in rows(TASK_KINDS[name], name, 64, 1, is_chat=False)]
    assert max(len(text.encode()) for text in texts) <= TASK_KINDS[name].prompt_tokens
    if name == "math":
        truth = first[0]["reward_model"]["ground_truth"]
        assert reward_of(name)("mine", truth, truth)["score"] == 1.0


def test_layouts_divide_the_gpus() -> None:
    assert list(layouts(0)) == [(1, 1)]
    assert list(layouts(4)) == [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]
    assert all(12 % (tp * pp) == 0 and tp <= 8 for tp, pp in layouts(12))


def test_the_first_layout_that_fits_is_taken(tmp_path: Path) -> None:
    """7 billion parameters on 8 GPUs: TP1 needs more than a GPU has. Would not catch a layout that is slow."""
    config = write_project(tmp_path / "mine", SHAPES / "qwen2.5-7b", "math", 8, is_tiny=False)
    megatron = config.actor_rollout_ref.actor.megatron
    assert (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size) == (2, 1)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.trainer.device) == (1, 8, "cuda")
    assert len((tmp_path / "mine/train.jsonl").read_text().splitlines()) == 256
    row = json.loads((tmp_path / "mine/val.jsonl").read_text().splitlines()[0])
    assert row["data_source"] == "mine/math"
    with pytest.raises(ConfigError, match="already has run.yaml, reward.py, train.jsonl, val.jsonl; nearest: another"):
        write_project(tmp_path / "mine", SHAPES / "qwen2.5-7b", "math", 8, is_tiny=False)


def test_a_model_that_fits_nowhere_leaves_nothing(tmp_path: Path) -> None:
    rule = r"no layout of 8 GPUs was planned to fit: it needs .* GB of 77.0 GB; nearest: --gpus 16"
    with pytest.raises(ConfigError, match=rule):
        write_project(tmp_path / "mine", SHAPES / "llama-3-70b", "math", 8, is_tiny=False)
    assert list((tmp_path / "mine").iterdir()) == []
