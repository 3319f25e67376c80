"""`eval` and `generate` as a user starts them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from short_runs import LOCAL, SHORT, WITHOUT_RAY
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

SAVING = ("trainer.save_freq=2", "actor_rollout_ref.actor.checkpoint.async_save=true")
PARTS = "actor_rollout_ref.rollout.max_num_seqs=8"
"""With four answers to each of 40 prompts: five parts."""


@pytest.fixture
def evaluation(command_line, few_prompts):
    """Start `eval` or `generate` on the demo's held-out prompts; it writes to the folder `run`."""

    def start(folder: Path, *options: str, stage: str = "eval", data: Path | None = None):
        given = ("--out", str(folder / "run"), "--data", str(data or few_prompts / "test.parquet"))
        return command_line(*options, *given, folder=folder, stage=stage, names_folder=False)

    return start


def lines(folder: Path) -> list[dict]:
    """The answers of an evaluation."""
    return [json.loads(line) for line in (folder / "run/answers.jsonl").read_text().splitlines()]


def test_a_stopped_evaluation_goes_on(evaluation, tmp_path) -> None:
    """Cut in the middle of an answer, as a kill leaves it: the same answers and numbers as left alone, and only what
    was missing is drawn. Another number of samples in the same folder is refused. Would not catch a kill of a rank.
    """
    whole = evaluation(tmp_path / "whole", *LOCAL, PARTS, "--samples", "4")
    assert whole.wait() == 0, whole.text()
    content = (tmp_path / "whole/run/answers.jsonl").read_bytes()
    (tmp_path / "cut/run").mkdir(parents=True)
    shutil.copy(tmp_path / "whole/run/evaluation.json", tmp_path / "cut/run")
    ends = [place for place, byte in enumerate(content) if byte == ord("\n")]
    (tmp_path / "cut/run/answers.jsonl").write_bytes(content[: ends[65] + 9])  # 66 answers: 16 prompts and a half
    resumed = evaluation(tmp_path / "cut", *LOCAL, PARTS, "--samples", "4")
    assert resumed.wait() == 0, resumed.text()
    assert "resuming with 24 of 40 prompts" in resumed.text()
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    tables = [json.loads((tmp_path / name / "run/evaluation_table.json").read_text()) for name in ("cut", "whole")]
    assert tables[0] == tables[1]
    rows = lines(tmp_path / "whole")
    assert [(row["index"], row["sample"]) for row in rows] == [divmod(number, 4) for number in range(160)]
    right = [row["output"] == row["gts"] for row in rows]
    assert [row["acc"] for row in rows] == list(map(float, right)) and 0 < sum(right) < 160
    assert tables[0]["demo/addition"]["acc"]["value"] == pytest.approx(sum(right) / 160)
    any_right = sum(any(right[first : first + 4]) for first in range(0, 160, 4)) / 40
    assert tables[0]["demo/addition"]["pass@4"]["value"] == pytest.approx(any_right)
    assert (tmp_path / "whole/run/evaluation.png").stat().st_size > 10_000
    refused = evaluation(tmp_path / "cut", *LOCAL, PARTS, "--samples", "2")
    assert refused.wait() == 2 and "sampling was {'n': 4" in refused.text(), refused.text()


@pytest.mark.exhaustive
def test_a_checkpoint_generates_without_ground_truth(recorded, evaluation, few_prompts, tmp_path) -> None:
    """Greedy answers of the newest checkpoint of a run are those of transformers with the model that it exported."""
    run = recorded("five steps", *SHORT, *LOCAL, *SAVING).run
    prompts = pyarrow.parquet.read_table(few_prompts / "test.parquet")["prompt"].to_pylist()[:12]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt, "data_source": "mine"}) + "\n" for prompt in prompts))
    made = evaluation(tmp_path, *LOCAL, "--model", str(run), stage="generate", data=data)
    assert made.wait() == 0, made.text()
    rows = lines(tmp_path)
    assert [row["index"] for row in rows] == list(range(12)) and not {"score", "acc"} & set(rows[0])
    tokenizer = AutoTokenizer.from_pretrained(run / "hf_model")
    model = AutoModelForCausalLM.from_pretrained(run / "hf_model", dtype=torch.float32)
    for row in rows:
        ids = tokenizer(row["input"], return_tensors="pt").input_ids
        drawn = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert row["output"] == tokenizer.decode(drawn, skip_special_tokens=True)


@pytest.mark.exhaustive
def test_answers_do_not_depend_on_the_layout(evaluation, tmp_path) -> None:
    """Four ranks (TP2xPP2, without Ray) and one process draw the same answers."""
    for name, layout in (("four", (WITHOUT_RAY,)), ("local", LOCAL)):
        run = evaluation(tmp_path / name, *layout, "--samples", "2")
        assert run.wait() == 0, run.text()
    assert lines(tmp_path / "four") == lines(tmp_path / "local")


@pytest.mark.exhaustive
def test_a_run_that_only_validates_leaves_its_files_alone(command_line, tmp_path) -> None:
    """verl's `trainer.val_only`, in the folder of a run that has trained: the answers lie in a folder of their own.

    Would not catch numbers that differ from a validation's.
    """
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 7}\n')
    run = command_line(*LOCAL, "trainer.val_only=true", folder=tmp_path)
    assert run.wait() == 0, run.text()
    assert (tmp_path / "run/metrics.jsonl").read_text() == '{"step": 7}\n'
    rows = [json.loads(line) for line in (tmp_path / "run/evaluation/answers.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(40)) and all(row["sample"] == 0 for row in rows)
