"""A run whose output nobody reads trains to its end, with all of its files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from short_runs import LOCAL, SHORT

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

TRAIN = (sys.executable, "-m", "megatron_rl", "train", "--config", "configs/demo_cpu.yaml")


@pytest.mark.exhaustive
def test_a_reader_that_leaves_and_a_closed_stderr(command_line, tmp_path: Path) -> None:
    """`2>&- | head -1`, a reward function that prints, a folder with a dash, a space and an umlaut in its name.

    Would not catch a reader that stays and stops reading: then any program waits.
    """
    reward, folder = tmp_path / "reward.py", tmp_path / "-my läufe" / "run 1"
    reward.write_text(
        "import sys\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    print('x' * 70_000, flush=True)\n"
        "    print('x' * 70_000, file=sys.stderr, flush=True)\n"
        "    return float(solution_str == ground_truth)\n"
    )
    run = command_line(
        *SHORT,
        *LOCAL,
        f"custom_reward_function.path={reward}",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        f"trainer.default_local_dir={folder}",
        command=("bash", "-c", '"$@" 2>&- | head -1; exit "${PIPESTATUS[0]}"', "bash", *TRAIN),
        names_folder=False,
    )
    assert run.wait() == 0, run.text()
    assert len(run.text().splitlines()) == 1
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward/failed_ratio"]) for line in logged] == [(1, 0.0), (2, 0.0)]
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    written = {path.name for path in folder.iterdir()}
    assert {"hf_model", "curves.png", "tensorboard", "global_step_2"} <= written
    assert run.left_over() == []
