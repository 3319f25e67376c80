"""The training loop of docs/train/own_loop.md."""

from __future__ import annotations

import json
import sys
from collections import defaultdict

import torch
from demo_loop import best_and_worst
from short_runs import ONE, SHORT, metrics


def test_best_and_worst_by_hand():
    """Groups that lie apart, equal scores within a group and in all of one, and a batch that teaches nothing."""
    scores = torch.tensor([0.5, 1.0, 0.0, 0.2, 0.5, 0.0, 1.0, 0.2])
    groups = torch.tensor([7, 3, 3, 5, 7, 3, 3, 5])
    assert best_and_worst(scores, groups).tolist() == [2, 6]
    assert best_and_worst(torch.tensor([2.0, 1.0, 3.0]), torch.tensor([0, 0, 0])).tolist() == [1, 2]
    assert best_and_worst(scores[[0, 4]], groups[[0, 4]]).tolist() == [0, 1]


def test_the_loop_runs(command_line, tmp_path):
    """Two steps: two rows for each prompt with a right and a wrong response, by the tables of the run's samples.

    Would not catch a loop that trains other rows of these groups: the test above has the rows.
    """
    command = (sys.executable, "scripts/demo_loop.py", "--local", "--config", "configs/grpo_cpu.yaml")
    keys = (*ONE, *SHORT, "trainer.total_training_steps=2", f"trainer.rollout_data_dir={tmp_path / 'tables'}")
    run = command_line(*keys, command=command)
    assert run.wait() == 0, run.text()
    assert run.left_over() == []
    for step, logged in metrics(run).items():
        groups = defaultdict(set)
        for line in (tmp_path / "tables" / f"{step}.jsonl").read_text().splitlines():
            row = json.loads(line)
            groups[row["input"]].add(row["score"])
        assert logged["loop/kept_rows"] == 2 * sum(len(scores) > 1 for scores in groups.values()), step
        assert logged["actor/grad_norm"] > 0
    assert len(metrics(run)) == 2
