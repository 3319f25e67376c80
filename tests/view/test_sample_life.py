"""The life of a sample against a record made by hand, and `megatron-rl explain` of it."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex

import pytest
from hand_made import TOKENS, recorded
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.errors import ConfigError
from megatron_rl.observe.sample_files import write_step
from megatron_rl.view.sample_life import life_lines, sample_life, token_table


def test_the_life_of_a_sample_has_the_numbers_of_its_record():
    """Worked out by hand: e^0.25 = 1.2840254 as float32, and 0.375 of a magnitude of 2.5. Would not catch a column that
    the record left out.
    """
    life = sample_life(recorded(), 0)
    assert (life["step"], life["samples"], life["prompt_index"], life["number_in_group"]) == (6, 6, 40, 0)
    assert (life["prompt"], life["answer"], life["ground_truth"], life["outcome"]) == ("1+1=", "2", "2", "ended")
    assert life["score"] == 1.0 and life["group_scores"] == [1.0, 0.0] and life["rewards"] == {"acc": 1.0}
    assert life["loss"] == -0.375 and life["loss_of_step"] == -0.625 and life["share"] == pytest.approx(0.15)
    assert life["sampled"] == [False] * 4 + [True] * 2 and life["tokens"] == TOKENS[0]
    assert life["numbers"] == {
        "versions": [4, 5],
        "rollout_log_probs": [-0.5, -0.25],
        "old_log_probs": [-0.25, -0.25],
        "difference": [0.25, 0.0],
        "ratio": [1.2840254, 1.0],
        "advantages": [1.0, 0.5],
        "loss_terms": [-0.25, -0.125],
    }


def test_lines_and_tokens_of_a_life():
    """Would not catch a number that is right in the data and cut in a narrow terminal."""
    life = sample_life(recorded(), 1)
    lines = life_lines(life)
    assert lines[0] == "step 6, sample 1 of 6: prompt 40 of sums, response 1 to it"
    assert lines[4] == "score    0; its group: 1 0, mean 0.5"
    assert lines[-1] == "loss    +0.25 of the step's -0.625 where the ratio is 1; 10.00% of what all its tokens weigh"
    headings, rows = token_table(life)
    assert headings == ["", "token", "version", "engine", "trainer", "difference", "ratio", "advantage", "loss"]
    *_, last = rows
    assert last == ("4", '"3"', "5", "-1.5", "-2", "-0.5", "0.60653", "-1", "0.25")


@pytest.mark.parametrize(("row", "outcome"), [(0, "ended"), (2, "cut off"), (3, "failed episode")])
def test_outcomes(row, outcome):
    assert sample_life(recorded(), row)["outcome"] == outcome


@pytest.mark.parametrize(("row", "nearest"), [(4, 3), (-1, 0)])
def test_a_sample_that_is_not_there_is_refused(row, nearest):
    with pytest.raises(ConfigError, match=f"try: --sample {nearest}$"):
        sample_life(recorded(), row)


def explain(*arguments: str) -> str:
    """What `megatron-rl explain` prints."""
    result = CliRunner().invoke(app, ["explain", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_explain_prints_texts_as_they_are(tmp_path):
    """Markup of rich and of HTML is text. Would not catch what a terminal makes of other characters."""
    write_step(tmp_path / "samples", recorded())
    output = explain(str(tmp_path), "--step", "6", "--sample", "3")
    assert '"[/b]"' in output and '"<b>8</b>"' in output and "failed episode" in output
    assert json.loads(explain(str(tmp_path), "--step", "6", "--sample", "3", "--json"))["tokens"] == TOKENS[3]


def test_explain_lists_steps_and_samples_and_leads_on(tmp_path, monkeypatch):
    """The best and the worst of each step, all of one, and the command for one of them.

    Would not catch a response that is cut in a narrow terminal.
    """
    monkeypatch.setenv("COLUMNS", "160")
    for step in (6, 7):
        write_step(tmp_path / "samples", dataclasses.replace(recorded(), step=step))
    scores = recorded().columns["scores"].tolist()
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    steps = json.loads(explain(str(tmp_path), "--json"))["steps"]
    assert [(one["step"], one["recorded"], one["samples"]) for one in steps] == [(6, 4, 6), (7, 4, 6)]
    assert {(one["best"]["sample"], one["worst"]["sample"]) for one in steps} == {(best, worst)}
    listed = json.loads(explain(str(tmp_path), "--step", "6", "--json"))["samples"]
    assert [one["score"] for one in listed] == scores and [one["tokens"] for one in listed][:2] == [2, 1]
    assert listed[2]["outcome"] == "cut off" and listed[0]["prompt"] == "1+1="
    output = explain(str(tmp_path))
    assert re.search(r"│ 6 +│ +4 │ +6 │", output)
    words = shlex.split(output.splitlines()[-1])
    assert words[1:] == ["explain", str(tmp_path), "--step", "7", "--sample", str(worst)]
    assert "cut off" in explain(str(tmp_path), "--step", "6") and "score" in explain(*words[2:])
    with pytest.raises(ConfigError, match="--sample 0 needs the step of the sample; try: --step 7 --sample 0"):
        explain(str(tmp_path), "--sample", "0")


@pytest.mark.parametrize(
    ("folder", "step", "message"),
    [("no", "6", "is no folder"), ("empty", "6", "has no recorded samples"), ("run", "9", "try: --step 6")],
)
def test_explain_refuses_what_is_not_recorded(tmp_path, folder, step, message):
    write_step(tmp_path / "run/samples", recorded())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=message):
        explain(str(tmp_path / folder), "--step", step, "--sample", "0")
