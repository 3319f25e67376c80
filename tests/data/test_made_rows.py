"""Files with other columns as rows of verl's schema: what is chosen, written, and refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from megatron_rl.cli import main
from megatron_rl.config import adapter_files
from megatron_rl.data.made_rows import chosen_columns, rows_of_file, rows_of_tasks, write_rows
from megatron_rl.errors import ConfigError

QUESTIONS = [
    {"question": "1+1?", "answer": "a\n#### 2", "level": 3},
    {"question": "2+2?", "answer": "#### 4", "level": 1},
]


def written(folder: Path, rows: list[dict], name: str = "given.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def test_other_columns_become_rows(tmp_path):
    """Usual names are found; the truth is what follows; other columns are kept. Would not catch nested columns."""
    path = written(tmp_path, QUESTIONS)
    rows = rows_of_file(path, chosen_columns(path, None, None, "####"), "mine")
    first = {"data_source": "mine", "prompt": [{"role": "user", "content": "1+1?"}]}
    assert rows[0] == first | {
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"level": 3, "index": 0},
    }
    for name in ("made.jsonl", "made.parquet"):
        write_rows(rows, tmp_path / name)
    assert pyarrow.parquet.read_table(tmp_path / "made.parquet").to_pylist() == rows
    assert [json.loads(line) for line in (tmp_path / "made.jsonl").open()] == rows


@pytest.mark.parametrize(
    ("rows", "options", "reason"),
    [
        ([*QUESTIONS, {"question": None, "answer": "1"}], (), "line 3, field 'question'"),
        ([*QUESTIONS, {"question": "3", "answer": None}], (), "answer"),
        ([{"q": "1"}], (), "--prompt must name a column"),
        (QUESTIONS, ("qestion",), "did you mean: question"),
        (QUESTIONS, ("level",), "must be a text or messages"),
    ],
)
def test_rows_of_another_form_are_refused(tmp_path, rows, options, reason):
    """With row and field, or the nearest column. Would not catch a text in a wrong language."""
    path = written(tmp_path, rows)
    with pytest.raises(ConfigError) as refusal:
        rows_of_file(path, chosen_columns(path, *(*options, None, None)[:2], ""), "mine")
    assert reason in str(refusal.value)


def test_parquet_refuses_what_it_cannot_hold(tmp_path):
    """A column with texts and numbers. Would not catch one with texts that are numbers."""
    tasks = [{"prompt": "x", "ground_truth": "", "extra_info": {"seed": seed}} for seed in (1, "2")]
    with pytest.raises(ConfigError, match=r"try: --out .*\.jsonl"):
        write_rows(rows_of_tasks(tasks, "mine"), tmp_path / "made.parquet")
    with pytest.raises(ConfigError, match="must end with"):
        write_rows([], tmp_path / "made.csv")


def test_the_command_makes_rows_of_an_adapters_tasks(tmp_path, monkeypatch, capsys):
    """By another interpreter, and with its reasons. Would not catch an adapter without tasks."""
    tasks = "def rows(name, size, seed, word='x'):\n    if name != 'known': raise ValueError('no ' + name)\n"
    tasks += "    return [{'prompt': word * (seed + n), 'ground_truth': '', 'extra_info': {}} for n in range(size)]\n"
    (tmp_path / "mine.py").write_text(tasks)
    monkeypatch.setattr(adapter_files, "ADAPTERS", tmp_path)
    out = tmp_path / "made.jsonl"

    def command(name: str, *options: str) -> int | str | None:
        words = ["megatron-rl", "dataset", "--from", name, "--out", str(out), "--size", "3", "--seed", "2", *options]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    python = ("--python", sys.executable)
    assert command("mine:known", *python, "word=ab") == 0
    prompts = [json.loads(line)["prompt"][0]["content"] for line in out.open()]
    assert prompts == ["abab", "ababab", "abababab"]
    for name, options, reason in (
        ("mine:known", python, "exists; try: --force"),
        ("mine:other", (*python, "--force"), "ValueError: no other"),
        ("mine:known", ("--force",), "needs --python"),
        ("min:known", ("--force",), "did you mean: mine:NAME"),
    ):
        capsys.readouterr()
        assert command(name, *options) == 2
        assert reason in "".join(capsys.readouterr())
