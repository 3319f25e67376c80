"""Columns of prompt files that a plan looks for, and what it suggests for one that a file lacks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from model_folders import problems

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.eval_config import for_evaluation, unjudged
from megatron_rl.data.long_prompts import long_prompt_problems
from megatron_rl.planning.file_rules import train_rows


def test_columns_of_a_flat_file_are_suggested_by_their_meaning(config, tmp_path):
    """The question as the prompt, the answer as the ground truth, and a key for the source; with these keys nothing is
    wrong. Where nothing scores, a file of prompts alone will do. Would not catch names in another language.
    """
    data = config.data
    data.train_files = data.val_files = str(tmp_path / "train.jsonl")
    Path(data.train_files).write_text(json.dumps({"answer": "4", "question": "2+2"}) + "\n")
    prompt, source, truth = problems(config)
    assert prompt.endswith("train.jsonl has answer (text), question (text); try: data.prompt_key=question")
    assert "data.default_data_source=openai/gsm8k" in source and "did you mean" not in source
    assert truth.endswith("train.jsonl has answer, question; did you mean: answer")
    data.prompt_key, data.ground_truth_key, data.default_data_source = "question", "answer", "openai/gsm8k"
    assert problems(config) == []
    data.ground_truth_key, data.default_data_source, config.trainer.val_only = "truth", None, True
    assert problems(unjudged(for_evaluation(config))) == []
    data.train_max_samples = 3
    assert train_rows(data) == [1] and train_rows(replace(data, train_files=[data.train_files] * 9)) == [3]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {},
            "must be at least the 9 tokens of the longest prompt of {} (row 1); try: 9; or data.filter_overlong",
        ),
        ({"max_prompt_length": 9}, None),
        ({"truncation": "left"}, None),
        ({"filter_overlong_prompts": True}, None),
        ({"ground_truth_key": "no"}, "{} has no column 'no' (data.ground_truth_key)"),
    ],
)
def test_a_prompt_that_is_too_long_is_found_before_the_run(config, tmp_path, keys, message):
    """By the demo's tokenizer, a token for each digit. Would not catch what a template adds to a short prompt."""
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"question": "1" * size, "answer": "4"}) + "\n" for size in (3, 9)))
    files = {"train_files": str(file), "val_files": str(file), "max_prompt_length": 8, "default_data_source": "x"}
    given = files | {"prompt_key": "question", "ground_truth_key": "answer"} | keys
    config.data = replace(config.data, **given)
    config.actor_rollout_ref.model.path = str(Path(__file__).parents[2] / "assets/demo/model")
    found = [str(violation) for violation in long_prompt_problems(config, lambda path: ModelFolder(path).tokenizer)]
    assert found == [] if message is None else message.format(file) in found[0] and len(found) == 1
    config.actor_rollout_ref.model.path = str(tmp_path)
    assert long_prompt_problems(config, lambda path: ModelFolder(path).tokenizer) == []
