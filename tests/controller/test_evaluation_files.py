"""The files of an evaluation, without a run (tests/e2e/test_eval_runs.py has some)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_rl.controller.evaluation import SETTINGS_FILE, refuse_other_settings, whole_rows
from megatron_rl.errors import ConfigError


def test_a_folder_with_other_settings_is_refused_by_their_names(tmp_path: Path) -> None:
    refuse_other_settings(tmp_path, {"seed": 1})
    (tmp_path / SETTINGS_FILE).write_text(json.dumps({"seed": 1, "model": "a"}))
    refuse_other_settings(tmp_path, {"seed": 1, "model": "a"})
    with pytest.raises(ConfigError, match=rf"other settings: seed was 1, is 2; nearest: --out {tmp_path}_2"):
        refuse_other_settings(tmp_path, {"seed": 2, "model": "a"})
    (tmp_path / SETTINGS_FILE).write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        refuse_other_settings(tmp_path, {"seed": 1})


def test_the_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    """Its metrics would be replaced."""
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=rf"has the metrics of a run; nearest: --out {tmp_path}/evaluation"):
        refuse_other_settings(tmp_path, {"seed": 1})


@pytest.mark.parametrize("cut", [0, 1, 9])
def test_what_a_kill_left_of_a_prompt_is_cut_off(tmp_path: Path, cut: int) -> None:
    """Three prompts of two answers; the file ends whole, one byte short, or within the last answer but one."""
    file = tmp_path / "answers.jsonl"
    lines = [json.dumps({"index": row // 2, "sample": row % 2}) + "\n" for row in range(6)]
    whole = "".join(lines)
    file.write_text(whole[: len(whole) - cut])
    rows = whole_rows(file, 2)
    assert [row["index"] for row in rows] == ([0, 0, 1, 1, 2, 2] if not cut else [0, 0, 1, 1])
    assert file.read_text() == "".join(lines[: len(rows)])
    assert whole_rows(tmp_path / "absent.jsonl", 2) == []
