"""docs/start/tutorial.md, executed command by command, as its reader types them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import REPOSITORY
from forked_run import ForkedRun

PAGE = REPOSITORY / "docs/start/tutorial.md"
COMMANDS = [
    line for block in re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.M | re.S) for line in block.splitlines()
]
SHORT = {
    "sft": ["trainer.total_training_steps=2"],
    "train": ["trainer.total_training_steps=5", "data.train_batch_size=32"],
}
"""Command -> settings that shorten it: a checkpoint is saved after step 5."""


def typed(line: str, folder: Path, further: dict[str, list[str]]) -> str:
    """Run a line of the page in a folder; what it printed."""
    words = shlex.split(line)
    if words[0] == "megatron-rl":
        output = folder / "printed.txt"
        run = ForkedRun([*words[1:], *further.get(words[1], ())], folder, {"COLUMNS": "200"}, output)
        assert run.wait() == 0, f"{line}\n{output.read_text()}"
        return output.read_text()
    words = [sys.executable, str(REPOSITORY / words[1]), *words[2:]]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def played(folder: Path, further: dict[str, list[str]]) -> dict[str, str]:
    """Run all lines of the page; command -> what its last call printed."""
    return {" ".join(shlex.split(line)[:2]): typed(line, folder, further) for line in COMMANDS}


@pytest.mark.slow
def test_every_command_of_the_tutorial(tmp_path: Path) -> None:
    """With few steps. Would not catch that nothing is learned."""
    printed = played(tmp_path, SHORT)
    assert "prompts: column question" in printed["megatron-rl init"]
    assert "pass@" in printed["megatron-rl eval"] and "advantage" in printed["megatron-rl explain"]
    for made in ("sft/hf_model", "grpo/global_step_5", "model_out"):
        assert (tmp_path / "mine" / made).is_dir()


@pytest.mark.exhaustive
def test_the_tutorial_teaches(tmp_path: Path) -> None:
    """As typed: the loss and the reward that the page names, about. Would not catch a page that explains badly."""
    played(tmp_path, {})
    losses, rewards = (
        [line[name] for text in file.read_text().splitlines() if name in (line := json.loads(text))]
        for name, file in (
            ("val/loss", tmp_path / "mine/sft/metrics.jsonl"),
            ("critic/score/mean", tmp_path / "mine/grpo/metrics.jsonl"),
        )
    )
    assert losses[0] > 5 and losses[-1] < 0.3
    assert sum(rewards[:5]) / 5 + 0.1 < sum(rewards[-5:]) / 5, rewards
