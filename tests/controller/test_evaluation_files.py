"""The files of an evaluation, without a run (tests/e2e/test_eval_runs.py has some)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megatron_rl.config.load import read_override, read_settings
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.setting import Setting
from megatron_rl.controller.evaluation import cut_off
from megatron_rl.controller.evaluation_files import SETTINGS_FILE, AnswersFile, refuse_other_settings, settings_of
from megatron_rl.errors import ConfigError


def same(**content: Any) -> dict[str, Any]:
    return {"seed": 1, "model": "a", "content": {"weights": "b"} | content}


def test_a_folder_with_other_settings_is_refused_by_their_names(tmp_path: Path) -> None:
    """Paths may differ. Would not catch a setting that is not among them."""
    refuse_other_settings(tmp_path, same())
    (tmp_path / SETTINGS_FILE).write_text(json.dumps(same()))
    refuse_other_settings(tmp_path, same() | {"model": "moved"})
    with pytest.raises(ConfigError, match=rf"other settings: seed was 1, is 2; try: --out {tmp_path}_2"):
        refuse_other_settings(tmp_path, same() | {"seed": 2})
    with pytest.raises(ConfigError, match="other settings: weights was b, is c, x was None, is 1;"):
        refuse_other_settings(tmp_path, same(weights="c", x=1))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "levels deep"),
        ("[]", "is not an object in braces"),
        ("7", "is not an object in braces"),
        ("null", "is not an object in braces"),
        ('"text"', "is not an object in braces"),
        ('{"seed": 1}', "does not identify by content what its responses depend on"),
        ('{"content": []}', "does not identify by content"),
    ],
)
def test_damaged_settings_are_one_sentence(tmp_path: Path, content: str, said: str) -> None:
    """With the way out. Would not catch a file that is damaged into other settings, which are refused as such."""
    (tmp_path / SETTINGS_FILE).write_text(content)
    with pytest.raises(ConfigError, match=rf"{said}.*; try: --out {tmp_path}_2"):
        refuse_other_settings(tmp_path, same())


def test_the_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    """Its metrics would be replaced. An evaluation writes none, and may have been killed as it started."""
    (tmp_path / "metrics.jsonl").write_text("")
    refuse_other_settings(tmp_path, same())
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=rf"has the metrics of a run; try: --out {tmp_path}/evaluation"):
        refuse_other_settings(tmp_path, same())


def test_answers_without_settings_are_refused(tmp_path: Path) -> None:
    """Nothing says which model gave them. Would not catch settings that were copied from another evaluation."""
    (tmp_path / "answers.jsonl").write_text(row(0, 0))
    with pytest.raises(ConfigError, match=rf"no evaluation.json identifies .*; try: --out {tmp_path}_2"):
        refuse_other_settings(tmp_path, same())


def row(index: int | None, sample: int, **changes: Any) -> str:
    return json.dumps({"index": index, "sample": sample, "data_source": "sums", "score": 1.0} | changes) + "\n"


def answers(file: Path) -> AnswersFile:
    return AnswersFile(file, 2, frozenset(range(3)), is_scored=True)


def test_responses_that_were_cut_off_are_counted() -> None:
    """With the key of the limit. Would not catch a limit that the model's positions set."""
    rows = [{"is_cut_off": cut} for cut in (True, False, True)]
    line = "2 of 3 responses were cut off at data.max_response_length=16; try: data.max_response_length=32"
    assert cut_off(rows, 16) == [line] and cut_off(rows[1:2], 16) == []


@pytest.mark.parametrize("cut", [0, 1, 9])
def test_what_a_kill_left_of_a_prompt_is_cut_off(tmp_path: Path, cut: int) -> None:
    """Three prompts of two answers; the file ends whole, one byte short, or within the last answer but one."""
    file = tmp_path / "answers.jsonl"
    lines = [row(*divmod(number, 2)) for number in range(6)]
    whole = "".join(lines)
    file.write_text(whole[: len(whole) - cut])
    rows = answers(file).whole_rows()
    assert [each["index"] for each in rows] == ([0, 0, 1, 1, 2, 2] if not cut else [0, 0, 1, 1])
    assert file.read_text() == "".join(lines[: len(rows)])
    assert answers(tmp_path / "absent.jsonl").whole_rows() == []


def test_an_answer_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    """The file doubled, and a prompt of which one answer is there twice and the other is not. Would not catch two
    different answers under one number, of which the first counts."""
    file = tmp_path / "answers.jsonl"
    lines = [row(0, 0), row(0, 1), row(1, 0), row(1, 0)]
    file.write_text("".join(lines) * 2)
    assert [(each["index"], each["sample"]) for each in answers(file).whole_rows()] == [(0, 0), (0, 1)]
    assert file.read_text() == "".join(lines[:2])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("\n", "line 3 of .* is not valid JSON"),
        ("{\n", "line 3 of .* is not valid JSON"),
        ("[" * 100_000 + "\n", "levels deep"),
        ("[1]\n", "is not an object in braces"),
        (row(9, 0), "index=9 must be the row number of a prompt"),
        (row(None, 0), "index=None must be the row number of a prompt"),
        (row(1, 2), "sample=2 must be a number from 0 to 1"),
        (row(1, 0, score=None), "score=None must be a finite number"),
        (row(1, 0, score="1"), "score='1' must be a finite number"),
        (row(1, 0, acc="right"), "acc='right' must be a finite number"),
        (row(1, 0, data_source=7), "data_source=7 must be a text"),
    ],
)
def test_a_damaged_answer_is_one_sentence(tmp_path: Path, line: str, said: str) -> None:
    """In the middle, where no kill leaves one; nothing is lost. Would not catch another text of an answer."""
    file = tmp_path / "answers.jsonl"
    file.write_text(content := row(0, 0) + row(0, 1) + line + row(2, 0))
    with pytest.raises(ConfigError, match=said):
        answers(file).whole_rows()
    assert file.read_text() == content


def test_answers_are_a_file(tmp_path: Path) -> None:
    """A pipe would wait for ever."""
    os.mkfifo(tmp_path / "answers.jsonl")
    with pytest.raises(ConfigError, match="must be a file, and it is a pipe"):
        answers(tmp_path / "answers.jsonl").whole_rows()


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Of an evaluation with all that has content: model, adapter, prompts, a rule, an environment, a reward model."""
    for name, num_tensors in (("model", 300), ("judge", 124)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], "name": name}))
        (folder / "tokenizer_config.json").write_text("{}")
        save_file({f"t{number}": np.zeros(99, np.float32) for number in range(num_tensors)}, folder / "m.safetensors")
    (tmp_path / "model/additional_chat_templates").mkdir()
    (tmp_path / "model/additional_chat_templates/short.jinja").write_text("")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    save_file({"a": np.zeros(5, np.float32)}, tmp_path / "adapter/adapter_model.safetensors")
    for name in ("prompts.jsonl", "rule.py", "turns.py"):
        (tmp_path / name).write_text("1\n")
    shared = "actor_rollout_ref"
    files = {
        f"{shared}.model.path": "model",
        f"{shared}.model.lora.adapter_path": "adapter",
        "data.train_files": "prompts.jsonl",
        "data.val_files": "prompts.jsonl",
        "custom_reward_function.path": "rule.py",
        f"{shared}.rollout.multi_turn.environment.path": "turns.py",
        "reward_model.model.path": "judge",
    }
    others = (f"{shared}.model.lora.rank=4", f"{shared}.rollout.multi_turn.enable=true", "reward_model.enable=true")
    settings = [Setting(key, str(tmp_path / name), key) for key, name in files.items()]
    ready = read_settings([*settings, *(setting for text in others for setting in read_override(text))]).config
    assert ready is not None
    return ready


def one_element(file: Path) -> None:
    """Change one tensor of many, as an adapter of one linear does when it is merged."""
    tensors = load_file(file)
    save_file(tensors | {"t123": tensors["t123"] + 1}, file)


CHANGES = {
    "model": lambda folder: one_element(folder / "model/m.safetensors"),
    "its tokenizer": lambda folder: (folder / "model/tokenizer_config.json").write_text('{"chat_template": ""}'),
    "a named template": lambda folder: (folder / "model/additional_chat_templates/short.jinja").write_text("1"),
    "adapter": lambda folder: save_file({"a": np.ones(5, np.float32)}, folder / "adapter/adapter_model.safetensors"),
    "prompts of the same size": lambda folder: (folder / "prompts.jsonl").write_text("2\n"),
    "rule": lambda folder: (folder / "rule.py").write_text("2\n"),
    "environment": lambda folder: (folder / "turns.py").write_text("2\n"),
    "reward model": lambda folder: one_element(folder / "judge/m.safetensors"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_content_under_the_same_path_is_other_settings(config: RunConfig, tmp_path: Path, name: str) -> None:
    """By one difference, which the message names. Would not catch a file that the rule imports."""
    before = settings_of(config)
    (tmp_path / SETTINGS_FILE).write_text(json.dumps(before))
    refuse_other_settings(tmp_path, settings_of(config))
    CHANGES[name](tmp_path)
    after = settings_of(config)
    assert {key for key in before if before[key] != after[key]} == {"content"}
    with pytest.raises(ConfigError, match=r"has an evaluation with other settings: \S+ was \S+, is \S+;"):
        refuse_other_settings(tmp_path, after)


def test_copies_and_layouts_are_the_same_settings(config: RunConfig, tmp_path: Path) -> None:
    """Another path of the model, another layout, more processes. A template's argument is another setting."""
    (tmp_path / SETTINGS_FILE).write_text(json.dumps(settings_of(config)))
    shared = config.actor_rollout_ref
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    shared.model.path, shared.actor.megatron.tensor_model_parallel_size = str(tmp_path / "copy"), 2
    config.reward_model.num_workers, shared.rollout.max_num_seqs = 7, 3
    refuse_other_settings(tmp_path, settings_of(config))
    config.data.apply_chat_template_kwargs = {"enable_thinking": False}
    with pytest.raises(ConfigError, match="prompts.apply_chat_template_kwargs.enable_thinking was None, is False"):
        refuse_other_settings(tmp_path, settings_of(config))
