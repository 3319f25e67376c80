"""Columns of prompt files that a plan looks for, and what it suggests for one that a file lacks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from model_folders import problems

from megatron_rl.config.eval_config import for_evaluation, unjudged
from megatron_rl.planning.file_rules import train_rows


def test_columns_of_a_flat_file_are_suggested_by_their_meaning(config, tmp_path):
    """The question as the prompt, the answer as the ground truth, and a key for the source; with these keys nothing is
    wrong. Where nothing scores, a file of prompts alone will do. Would not catch names in another language.
    """
    data = config.data
    data.train_files = data.val_files = str(tmp_path / "train.jsonl")
    Path(data.train_files).write_text(json.dumps({"answer": "4", "question": "2+2"}) + "\n")
    prompt, source, truth = problems(config)
    assert prompt.endswith("train.jsonl has answer (text), question (text); did you mean: question")
    assert "data.default_data_source=openai/gsm8k" in source and "did you mean" not in source
    assert truth.endswith("train.jsonl has answer, question; did you mean: answer")
    data.prompt_key, data.ground_truth_key, data.default_data_source = "question", "answer", "openai/gsm8k"
    assert problems(config) == []
    data.ground_truth_key, data.default_data_source, config.trainer.val_only = "truth", None, True
    assert problems(unjudged(for_evaluation(config))) == []
    data.train_max_samples = 3
    assert train_rows(data) == [1] and train_rows(replace(data, train_files=[data.train_files] * 9)) == [3]
