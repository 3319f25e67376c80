"""Projects on a file of one's own: its columns, its reward function, limits, held-out rows (`init --data`)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.config.load import load_config
from megatron_rl.config.schema import GROUND_TRUTH
from megatron_rl.errors import ConfigError
from megatron_rl.starter.own_data import SPLIT_FILE, split_command
from megatron_rl.starter.project import held_out_rows, split
from megatron_rl.starter.task_kinds import suited_kind

DEMO = Path(__file__).parents[2] / "assets/demo/model"
USER = [{"role": "user", "content": "1+1="}]
ANSWERED = [*USER, {"role": "assistant", "content": "2"}]


def init(folder: Path, rows: list[dict], *options: object, model: object = DEMO, val: bool = True):
    """What `init --data` says, and the configuration that it has written; rows also serve for validation."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--model", model, "--gpus", "0", "--data", data, *(("--val-data", data) if val else ()), *options]
    result = CliRunner().invoke(app, ["init", str(folder / "new"), *map(str, given)])
    if result.exception is not None:
        raise result.exception
    return result.output, load_config(folder / "new/run.yaml", [])


@pytest.mark.parametrize(
    ("row", "prompt", "truth", "kind"),
    [
        ({"question": "1+1=", "answer": "One and one.\n#### 2"}, "question", "answer", "math"),
        ({"prompt": "1+1=", "solution": "2"}, "prompt", "solution", "math"),
        ({"prompt": USER, "ground_truth": 2}, "prompt", "ground_truth", "math"),
        ({"problem": "1+1=", "answer": "2", "solution": "One and one make 2."}, "problem", "answer", "math"),
        ({"problem": "1+1=", "solution": r"It is \boxed{2}.", "messages": ANSWERED}, "problem", "solution", "built in"),
        ({"instruction": "1+1=", "input": "", "output": "two"}, "instruction", "output", "exact"),
        ({"messages": USER, "answer": "two"}, "messages", "answer", "exact"),
        ({"prompt": USER, "data_source": "d", "reward_model": {"ground_truth": "2"}}, "prompt", GROUND_TRUTH, "math"),
        ({"Text": "1+1=", "label": r"\frac{4}{2}"}, "Text", "label", "built in"),
    ],
)
def test_columns_and_kind_are_found(tmp_path, row, prompt, truth, kind):
    """Schemas of GSM8K, TRL, verl, prime-rl's environments, NuminaMath, Alpaca, and of nobody. Text goes through the
    template. Would not catch a column whose name says something else than it holds.
    """
    said, config = init(tmp_path, [row])
    data, reward = config.data, config.custom_reward_function
    assert (data.prompt_key, data.ground_truth_key) == (prompt, truth)
    assert data.default_data_source == (None if "data_source" in row else "rows")
    assert data.prompt_as_chat == (True if isinstance(row[prompt], str) else None)
    assert (reward.path is None, reward.name) == ((True, "math") if kind == "built in" else (False, "compute_score"))
    assert f"reward function: {'the built-in math' if kind == 'built in' else kind}" in said
    assert "as the model reads it, 4 tokens:\n    1+1=\n" in said and data.train_files == str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"prompt": "1", "question": "2", "answer": "3"},
            (),
            "question .text., .*: more than one would do; give --prompt-key with one of prompt, question; try: --",
        ),
        ({"instruction": "1", "input": "2", "output": "3"}, (), "--prompt-key with one of instruction, input"),
        (
            {"messages": ANSWERED, "answer": "2"},
            (),
            "end with the assistant's response .messages., which `megatron-rl sft`",
        ),
        (
            {"question": "1", "answer": "word " * 40},
            (),
            "such as 'word word .*give --kind with one of score, exact, math",
        ),
        (
            {"question": "1", "hint": "3"},
            (),
            "none has a usual name; give --ground-truth-key with one of hint, none; try",
        ),
        (
            {"question": "1", "answer": "3"},
            ("--prompt-key", "qestion"),
            "rows.jsonl; .*did you mean: --prompt-key question",
        ),
        ({"question": "1"}, ("--ground-truth-key", "none", "--kind", "math"), "--kind math needs a column of expected"),
        ({"answer": "1"}, (), "no column of text or messages for prompts .--prompt-key.: it has answer"),
    ],
)
def test_what_is_unclear_is_asked_with_the_choices(tmp_path, row, options, message):
    """Without a terminal an error lists columns and options, and nothing is written. Would not catch a question that a
    terminal is asked wrongly.
    """
    for model in (DEMO, "tiny"):  # the second would be made
        with pytest.raises(ConfigError, match=message):
            init(tmp_path, [row], *options, model=model)
        assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(("suffix", "num_rows"), [(".jsonl", 1), (".jsonl", 2), (".parquet", 2)])
def test_the_command_that_splits_conversations_does_so(tmp_path, suffix, num_rows):
    """Of a file whose name a shell would take apart. Would not catch a conversation that ends otherwise."""
    file = tmp_path / f'it\'s "mine"{suffix}'
    rows = [{"messages": ANSWERED}, {"messages": [*ANSWERED, *ANSWERED]}][:num_rows]
    if suffix == ".jsonl":
        file.write_text("\n\n".join(map(json.dumps, rows)))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    command = split_command(str(file), "messages").replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    made = [json.loads(line) for line in (tmp_path / SPLIT_FILE).read_text().splitlines()]
    first = "1+1=" if len(rows) == 1 else USER
    assert made == [{"prompt": first, "answer": "2"}, {"prompt": [*ANSWERED, *USER], "answer": "2"}][: len(rows)]


def test_a_prompt_alone_has_a_score(tmp_path):
    """Without expected answers the kind is a function of the user's, which gets None. Would not catch its call."""
    said, config = init(tmp_path, [{"prompt": "1"}], "--kind", "score")
    assert config.data.ground_truth_key is None and "expected answer" not in said


def test_without_a_file_to_validate_rows_are_held_out(tmp_path):
    """The rows are copied unchanged, a tenth of them into the held-out file, and a line says so; a row too few is said.

    Would not catch equal questions in both files.
    """
    rows = [{"question": f"{number}+1=", "answer": number + 1, "é": "\u2028"} for number in range(25)]
    said, config = init(tmp_path, rows, val=False)
    train, val = (
        [json.loads(line) for line in Path(file).read_text().split("\n") if line]
        for file in (config.data.train_files, config.data.val_files)
    )
    assert (len(train), len(val)) == (23, 2) and sorted((*train, *val), key=lambda row: row["answer"]) == rows
    assert "no --val-data: 2 of 25 rows held out for validation" in said and train[0] == rows[0]
    said, _ = init(tmp_path / "few" if (tmp_path / "few").mkdir() is None else tmp_path, rows[:3], val=False)
    assert "data.train_batch_size=16 is more than the 2 rows to train on" in said
    with pytest.raises(ConfigError, match="has 1 row, and one must be held out; try: --val-data FILE"):
        init(tmp_path / "x" if (tmp_path / "x").mkdir() is None else tmp_path, rows[:1], val=False)


def test_a_split_of_parquet_keeps_types(tmp_path):
    """Structs and lists as they were. Would not catch a file of another compression."""
    rows = [
        {"prompt": [{"role": "user", "content": str(n)}], "reward_model": {"ground_truth": str(n)}} for n in range(9)
    ]
    source, train, val = (tmp_path / f"{name}.parquet" for name in ("source", "train", "val"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source, row_group_size=2)
    held = held_out_rows(9, 3)
    split(source, held, train, val)
    parts = [pyarrow.parquet.read_table(file).to_pylist() for file in (train, val)]
    assert held == {8} and parts == [rows[:8], rows[8:]]
    assert held_out_rows(1000, 64) == {(n + 1) * 1000 // 64 - 1 for n in range(64)} and held_out_rows(2, 64) == {1}


@pytest.mark.parametrize(
    ("truths", "kind"),
    [
        (["4", "-1,000.5", "$3", 7, 2.5], "math"),
        (["so\n#### 4", "#### -2"], "math"),
        (["so\n#### four"], None),
        ([r"\frac{1}{2}", "3", "x^2"], "built-in math"),
        (["(1, 2)", r"a long solution " * 9 + r"\boxed{1}"], "built-in math"),
        (["yes", "no"], "exact"),
        (["yes", True], None),
        (["a\nb"], None),
        (["I have 3 and he has 4 of them, which is why it is as it is, and not otherwise"], None),
        ([], None),
    ],
)
def test_the_reward_function_suits_the_answers(truths, kind):
    """Would not catch numbers in words."""
    assert suited_kind(truths) == kind


def test_prompts_that_are_too_long_are_left_out(tmp_path):
    """Half of the demo model's 64 positions are the response's. Would not catch a limit that is too large for a GPU."""
    rows = [{"question": "1" * size, "answer": "2"} for size in (5, 40)]
    said, config = init(tmp_path, rows)
    data = config.data
    assert data.filter_overlong_prompts and data.max_prompt_length + data.max_response_length <= 64
    assert f"prompts of more than {data.max_prompt_length} tokens are left out" in said and "the longest has 40" in said


def test_a_response_has_room_for_the_longest_expected_answer(tmp_path):
    """And for the token that ends it: the tiny model's tokens are bytes. Would not catch a model that is wordier."""
    answers = ["6 + 6 = 12\n#### 12", "9 + 9 = 18; 18 + 1 = 19; 19 + 1 = 20\n#### 20"]
    assert [len(answer) for answer in answers] == [18, 44]
    for folder, some, limit in (("a", answers[:1], 32), ("b", answers, 48), ("c", ["#### 20"], 16)):
        (tmp_path / folder).mkdir()
        _, config = init(tmp_path / folder, [{"question": "1", "answer": each} for each in some], model="tiny")
        assert config.data.max_response_length == limit and config.actor_rollout_ref.actor.optim.lr == 3e-3


def test_a_name_of_the_hub_is_looked_for_where_a_run_looks(tmp_path, monkeypatch):
    """In the local cache, and the command that downloads it is said. Would not catch a half downloaded model."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(
        ConfigError, match="--model some/model is not in the local Hugging Face cache; try: hf download so"
    ):
        init(tmp_path, [{"question": "1", "answer": "2"}], model="some/model")
    snapshot = tmp_path / "hub/models--some--model/snapshots/1"
    shutil.copytree(DEMO, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("1")
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    _, config = init(tmp_path, [{"question": "1", "answer": "2"}], model="some/model")
    assert config.actor_rollout_ref.model.path == "some/model"
