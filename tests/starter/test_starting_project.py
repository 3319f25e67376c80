"""Projects to begin with: questions, rewards and layouts, without a run (tests/e2e/test_first_hour.py has one)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.cli.starting import KindName, made_model
from megatron_rl.errors import ConfigError
from megatron_rl.starter.project import layouts, write_project
from megatron_rl.starter.task_kinds import TASK_KINDS, rows

SHAPES = Path(__file__).parents[2] / "configs/models"
QWEN = str(SHAPES / "qwen2.5-7b")


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
        ("math", "so 1042", "1,000 and 42 make\n#### 1,042", {"score": 1.0, "acc": 1.0, "pred": "1042"}),
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
    config = write_project(tmp_path / "mine", QWEN, "math", 8, is_tiny=False)
    megatron = config.actor_rollout_ref.actor.megatron
    assert (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size) == (2, 1)
    trainer = config.trainer
    assert (trainer.nnodes, trainer.n_gpus_per_node, trainer.device, trainer.launcher) == (1, 8, "cuda", "local")
    trainer = write_project(tmp_path / "of_two_nodes", QWEN, "math", 16, is_tiny=False).trainer
    assert (trainer.nnodes, trainer.n_gpus_per_node, trainer.launcher) == (2, 8, "ray")
    assert len((tmp_path / "mine/train.jsonl").read_text().splitlines()) == 256
    row = json.loads((tmp_path / "mine/val.jsonl").read_text().splitlines()[0])
    assert row["data_source"] == "mine/math"
    with pytest.raises(ConfigError, match="already has run.yaml, reward.py, train.jsonl, val.jsonl; try: another"):
        write_project(tmp_path / "mine", QWEN, "math", 8, is_tiny=False)


@pytest.mark.parametrize("name", ["a #b", "c: d", 'quo"te', "it's", "- x", "@y", "z\\n", "{braces}", "ü 中"])
def test_names_that_mean_something_in_yaml_are_quoted(tmp_path: Path, name: str) -> None:
    """Of the folder and of the model. Would not catch a shell that reads the printed commands otherwise."""
    model = shutil.copytree(SHAPES / "qwen2.5-7b", tmp_path / name / "model")
    config = write_project(tmp_path / name / "new", str(model), "score", 8, is_tiny=False)
    assert config.data.train_files == str(tmp_path / name / "new/train.jsonl")
    assert config.actor_rollout_ref.model.path == str(model)


@pytest.mark.parametrize("name", ["e${x}", "line\nbreak", "no\udcffUTF-8", "\x1b[31m", "n" * 300])
def test_names_that_run_yaml_cannot_hold_are_refused(tmp_path: Path, name: str) -> None:
    """Before anything is written. Would not catch a name that only another system refuses."""
    answers = ["--kind", "score", "--gpus", "0"]
    for arguments in ([tmp_path / name, "--model", "tiny"], [tmp_path / "new", "--model", tmp_path / name]):
        result = CliRunner().invoke(app, ["init", *map(str, arguments), *answers])
        assert isinstance(result.exception, ConfigError), result.exception
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("settings", ["[" * 3000, "[]", '"chat_template"', "", "{", b"\xff"])
def test_a_broken_tokenizer_of_the_model_is_said(tmp_path: Path, settings: str | bytes) -> None:
    model = shutil.copytree(SHAPES / "qwen2.5-7b", tmp_path / "model")
    (model / "tokenizer_config.json").write_bytes(settings if isinstance(settings, bytes) else settings.encode())
    with pytest.raises(ConfigError, match=r"the tokenizer of .* cannot be read: tokenizer_config.json"):
        write_project(tmp_path / "new", str(model), "score", 8, is_tiny=False)


def test_a_link_in_the_folder_is_a_file_that_is_there(tmp_path: Path) -> None:
    """Also one to nothing, which would be written through."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/reward.py").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="already has reward.py"):
        write_project(tmp_path / "mine", QWEN, "math", 8, is_tiny=False)
    assert not (tmp_path / "elsewhere").exists()
    result = CliRunner().invoke(
        app, ["init", str(tmp_path / "x"), "--model", "~nouser/x", "--kind", "math", "--gpus", "0"]
    )
    assert isinstance(result.exception, ConfigError) and "~nouser/x is no folder" in str(result.exception)
    (tmp_path / "run/hf_model").mkdir(parents=True)
    (tmp_path / "run/hf_model/config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"try: --model {tmp_path}/run/hf_model, the model that this run has trained"):
        made_model(tmp_path / "x", str(tmp_path / "run"))


def test_a_model_that_fits_nowhere_leaves_nothing(tmp_path: Path) -> None:
    rule = r"no layout of 8 GPUs was planned to fit: it needs .* GB of 77.0 GB; try: --gpus 16"
    with pytest.raises(ConfigError, match=rule):
        write_project(tmp_path / "deep/mine", str(SHAPES / "llama-3-70b"), "math", 8, is_tiny=False)
    assert list(tmp_path.iterdir()) == []
