"""A run of supervised fine-tuning that is short: its model, rows and configuration, and the command that starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

REPOSITORY = Path(__file__).parents[3]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts" / "gpu_check_steps")]
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NODE_ADDRESS", "MASTER_ADDR")
PROGRAM = (sys.executable, "-W", "ignore", "-m", "megatron_rl")
LIMIT_S = 240
REHEARSED_S = 3000
"""Seconds of a rehearsal, which a busy machine may need."""


@dataclass(frozen=True)
class ShortRun:
    """Sizes of a run. layers: of the probe's model (`profile/probe.py`), on a GPU 42 million parameters each. repeats:
    of eight reversed digits, which are an answer.
    """

    device: str
    layers: int
    repeats: int
    batch: int
    pass_tokens: int
    steps: int = 12

    @classmethod
    def of(cls, device: str, small: bool) -> ShortRun:
        """A billion parameters and 64 answers of a thousand tokens on a GPU; a tiny one to try it."""
        return cls(device, 2, 3, 16, 1024) if small else cls(device, 24, 126, 64, 16384)

    @property
    def max_length(self) -> int:
        """Tokens of a row; one character is one token."""
        return 8 + 8 * self.repeats + 2

    def write(self, folder: Path, is_empty: bool = False) -> Path:
        """Write model, rows and configuration to the folder; return the configuration's file. is_empty: no weights."""
        from megatron_rl.profile.probe import save_model, write_config

        save_model(folder / "model", self.layers, self.device, self.max_length, is_empty)
        questions = [f"{number * 7919 % 10**8:08d}" for number in range(self.batch * 8)]
        rows = [{"prompt": question, "response": question[::-1] * self.repeats} for question in questions]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
        return write_config(self.settings(folder), folder / "sft.yaml")

    def settings(self, folder: Path) -> dict[str, Any]:
        """Keys of the run. Whole numbers of passes, one update a step."""
        rows = str(folder / "rows.parquet")
        actor = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": self.pass_tokens, "optim": {"lr": 3e-4}}
        return {
            "data": {
                "train_files": rows,
                "val_files": rows,
                "train_batch_size": self.batch,
                "max_length": self.max_length,
            },
            "actor_rollout_ref": {"model": {"path": str(folder / "model")}, "actor": actor},
            "trainer": {
                "device": self.device,
                "n_gpus_per_node": 1,
                "total_training_steps": self.steps,
                "test_freq": 0,
                "val_before_train": False,
                "export_hf": False,
                "logger": ["console", "jsonl"],
            },
        }

    def rehearse(self, overrides: Sequence[str] = ()) -> dict[str, float]:
        """See `rehearsed`: all layers, and the sizes of a GPU."""
        with tempfile.TemporaryDirectory() as scratch:
            return rehearsed(self.write(Path(scratch), is_empty=True), "sft", overrides)

    def train(self, config: Path, out: Path, overrides: Sequence[str] = ()) -> list[dict[str, float]]:
        """Run `megatron-rl sft --local` in a process of its own; return the metrics of its steps.

        Raises RuntimeError with the end of what it has printed.
        """
        command = [*PROGRAM, "sft", "--local", "--config", str(config), f"trainer.default_local_dir={out}"]
        run_program([*command, *overrides])
        return metrics(out)


def rehearsed(config: Path, stage: str, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Run one rank as on a GPU, without one; return GB of each phase.

    Raises RuntimeError where the configuration breaks a rule, the rank fails, or memory is not as planned.
    """
    out = config.parent / "rehearsed"
    command = [*PROGRAM, "rehearse", "--stage", stage, "--config", str(config), "--out", str(out), *overrides]
    run_program(command, REHEARSED_S)
    (rank,) = out.glob("rank*.json")
    phases = json.loads(rank.read_text())["phases"]
    return {phase: round(memory["peak"] / 1e9, 2) for phase, memory in phases.items()}


def run_program(command: Sequence[str], limit_s: float = LIMIT_S) -> None:
    """Run a command of megatron_rl. Raises RuntimeError with the end of what it has printed."""
    variables = {name: value for name, value in os.environ.items() if name not in PLACE}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode:
        raise RuntimeError(f"code {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")


def metrics(out: Path) -> list[dict[str, float]]:
    """The metrics of a run's steps."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def rate(steps: Sequence[dict[str, float]]) -> float:
    """Tokens a second: the median of the second half of the steps."""
    later = sorted(step["perf/throughput"] for step in steps[len(steps) // 2 :])
    return later[len(later) // 2]
