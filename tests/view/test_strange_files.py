"""Folders of runs that somebody else wrote, or damaged: a page of what can be read, or one sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hand_made import recorded
from safetensors.numpy import load_file, save_file
from test_page_data import made_run
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.errors import ConfigError
from megatron_rl.observe.sample_files import write_step

SECRET = "what-only-its-owner-reads"
HUGE, DEEP = "1" + "0" * 400, "[" * 5000
JSON_FILES = ("plan.json", "timeline.json", "summary.json")
CONTENTS = {
    "nothing": "",
    "a list": "[1, null]",
    "a text": '"x"',
    "a number": "NaN",
    "null": "null",
    "deep": DEEP,
    "deep and whole": DEEP + "]" * 5000,
    "huge": '{"config": {"trainer": HUGE}, "plan": {"time": {"seconds": {"gen": HUGE}}}}'.replace("HUGE", HUGE),
    "other types": '{"config": {"trainer": [1]}, "plan": {"time": {"seconds": [1]}}}',
    "other types further in": '{"config": [{}], "plan": {"time": {"seconds": {"gen": "x", "a": null}}}}',
    "other paths": '{"config": {"trainer": {"validation_data_dir": 1, "rollout_data_dir": "\\u0000"}}}',
    "other calls": '[{"start": "x"}, 1, {"lane": 1, "name": [], "start": 0, "stop": NaN}]',
    "half a pair": '{"config": {"a": "\\ud83d"}}',
    "no UTF-8": b"\xff\xfe{}",
}


def run(command: str, *arguments: object):
    """The result of a command; an exception that is no sentence for the user fails the test."""
    result = CliRunner().invoke(app, [command, *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, ConfigError | SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_any_json_is_shown_or_left_out(tmp_path: Path, content: str | bytes) -> None:
    """In each file of one value, in a table and in the metrics. Would not catch what a browser makes of the page."""
    folder = made_run(tmp_path / "run")
    data = content if isinstance(content, bytes) else content.encode()
    for name in JSON_FILES:
        (folder / name).write_bytes(data)
    (folder / "val_generations").mkdir()
    (folder / "val_generations/1.jsonl").write_bytes(b"\n".join([data, b'{"score": "x", "input": [1], "failure": {}}']))
    lines = [data, b'{"step": 5, "a": "text", "b": NaN, "c": true, "d": 1e999}', b'{"step": "6"}', b'{"step": true}']
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\n" + b"\n".join([*lines, b'{"step": 7, "actor/entropy": 1.5}', b'{"step": 8, "act']))
    result = run("view", folder)
    assert result.exit_code == 0 and "samples" in result.output
    page = (folder / "view.html").read_text()
    assert "4 <img" not in page and '"actor/entropy":[[1,2,3,7]' in page


def as_pipe(file: Path) -> None:
    os.mkfifo(file)


def as_link(file: Path) -> None:
    file.symlink_to(file)


@pytest.mark.parametrize("make", [Path.mkdir, as_pipe, as_link], ids=["a folder", "a pipe", "a loop"])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", *JSON_FILES, "val/1.jsonl", "samples/1.safetensors", "val/\u00b2.jsonl", "samples"]
)
def test_what_is_no_file_holds_nobody_up(tmp_path: Path, make: Callable[[Path], None], name: str) -> None:
    """A pipe would be waited for. Would not catch one that takes a file's place between two looks."""
    folder = made_run(tmp_path / "run")
    file = folder / name
    if file.is_dir():
        file.rename(folder / "moved")
    file.unlink(missing_ok=True)
    make(file)
    result = run("view", folder)
    assert (result.exit_code == 0) == (name != "metrics.jsonl")
    run("explain", folder, "--step", 1, "--sample", 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, details: tensors.pop("groups"),
        lambda tensors, details: tensors.pop("sampled/lengths"),
        lambda tensors, details: tensors.update(scores=np.zeros(2, np.float32)),
        lambda tensors, details: tensors.update({"sampled/lengths": np.array([6, 5, 1, 3])}),
        lambda tensors, details: tensors.update({"input_ids/lengths": np.array([-6, 17, 2, 2])}),
        lambda tensors, details: tensors.update({"advantages": np.zeros((5, 2), np.float32)}),
        lambda tensors, details: details.update(rows=[]),
        lambda tensors, details: details.update(rows={"a": 1}),
        lambda tensors, details: details.update(num_rows="6"),
        lambda tensors, details: details.update(totals={"loss": "x"}),
        lambda tensors, details: details.update(totals={}),
        lambda tensors, details: details["totals"].update(loss=10**400),
        lambda tensors, details: tensors.update(truncated=np.zeros((4, 2), np.bool_)),
        lambda tensors, details: tensors.update({"failed": np.ones(8), "failed/lengths": np.full(4, 2)}),
        lambda tensors, details: tensors.update({"scores": np.ones(8), "scores/lengths": np.full(4, 2)}),
        lambda tensors, details: tensors.update(groups=np.full(4, np.nan)),
        lambda tensors, details: tensors.update(old_log_probs=np.full(5, -128, np.int8)),
        lambda tensors, details: details["rows"][0].pop("tokens"),
        lambda tensors, details: details["rows"][0].update(tokens=7),
        lambda tensors, details: details["rows"][0].update(acc=json.loads("[" * 300 + "]" * 300)),
        lambda tensors, details: tensors.clear(),
    ],
)
def test_samples_that_lack_something_are_left_out(tmp_path: Path, change: Callable) -> None:
    """view goes on without them and says so; explain says what they lack."""
    folder = made_run(tmp_path / "run")
    file = folder / "samples/6.safetensors"
    tensors = load_file(file)
    details = json.loads(tensors.pop("details").tobytes())
    change(tensors, details)
    save_file(tensors | {"details": np.frombuffer(json.dumps(details).encode(), np.uint8)}, file)
    result = run("view", folder)
    assert result.exit_code == 0 and "1 of 1 samples" in result.output and "left out" in result.output
    assert isinstance(run("explain", folder, "--step", 6, "--sample", 0).exception, ConfigError)


def test_explain_prints_what_steers_a_terminal_as_escapes(tmp_path: Path) -> None:
    """Texts of the policy, of data and of a reward function; a score that is not finite; halves of surrogate pairs."""
    made, steers = recorded(), "\x1b[31m\x9b\u202e\ud83d\n"
    made.columns["scores"][0] = np.nan
    made.rows[0] |= dict.fromkeys(("input", "output", "gts", "data_source", "pred", steers), steers)
    made.rows[0]["tokens"][4] = steers
    write_step(tmp_path / "samples", made)
    output = run("explain", tmp_path, "--step", 6, "--sample", 0).output
    assert not {"\x1b", "\x9b", "\u202e", "\ud83d"} & set(output) and output.count("\\x9b") >= 6
    assert "score    not finite; its group: not finite 0" in output and len(output.splitlines()) < 24
    assert '"score": null' in run("explain", tmp_path, "--step", 6, "--sample", 0, "--json").output


def test_nothing_outside_of_the_folder_enters_a_page(tmp_path: Path) -> None:
    """A folder that plan.json names, and links; a flag reads them. Would not catch a hard link."""
    folder, others = made_run(tmp_path / "run"), tmp_path / "others"
    others.mkdir()
    (others / "1.jsonl").write_text(json.dumps({"input": SECRET}))
    (others / "own.json").write_text(json.dumps({"key": SECRET}))
    (folder / "plan.json").write_text(json.dumps({"config": {"trainer": {"validation_data_dir": str(others)}}}))
    (folder / "summary.json").unlink()
    (folder / "summary.json").symlink_to(others / "own.json")
    (folder / "val_generations").mkdir()
    (folder / "val_generations/2.jsonl").symlink_to(others / "1.jsonl")
    result = run("view", folder)
    assert result.output.count("it is outside of the run's folder; --outside reads it") == 3
    assert SECRET not in (folder / "view.html").read_text()
    assert "left out" not in run("view", folder, "--outside").output
    assert (folder / "view.html").read_text().count(SECRET) == 3
    (folder / "samples/7.safetensors").symlink_to(folder / "samples/6.safetensors")
    assert "left out" not in run("explain", folder, "--step", 7, "--sample", 0).output


@pytest.mark.parametrize("name", ["n" * 300, "no\udcffUTF-8", "a\x1b[31mb\u202e"])
def test_names_that_are_no_plain_text(tmp_path: Path, name: str) -> None:
    """Of a run that is there, if the system lets it be; and of the file to write, in a folder that is new."""
    assert isinstance(run("view", tmp_path / name / "no").exception, ConfigError)
    assert isinstance(run("explain", tmp_path / name, "--step", 1, "--sample", 0).exception, ConfigError)
    if len(name) < 256:
        folder = made_run(tmp_path / "run").rename(tmp_path / name)
        result = run("view", folder, "--out", tmp_path / "new" / name / "page.html")
        assert result.exit_code == 0 and (tmp_path / "new" / name / "page.html").exists()
        assert not {"\x1b", "\u202e"} & set(result.output)
