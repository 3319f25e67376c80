"""GRPO of a billion parameters on one GPU, with vLLM on the trainer's memory: tokens a second, and memory of phases."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from short_run import PROGRAM, ShortRun, metrics, rehearsed, run_program

import step_outcome  # isort: skip

STEPS = 3
RESPONSE = {"cpu": 8, "cuda": 160}


def write(folder: Path, device: str, small: bool, is_empty: bool = False, layers: int = 0) -> Path:
    """Write model, prompts and configuration; return the configuration's file. layers: 0 for those of sft."""
    from megatron_rl.profile import probe

    num_layers = layers or ShortRun.of(device, small).layers
    probe.save_model(folder / "model", num_layers, device, is_empty=is_empty)
    probe.save_data(folder)
    content = probe.settings(folder, folder / "model", device, 1, RESPONSE["cpu" if small else device])
    content["algorithm"] = {"adv_estimator": "grpo"}
    content["trainer"]["total_training_steps"] = STEPS
    content["data"]["max_prompt_length"] = probe.RUN_PROMPT
    if not small:
        content["actor_rollout_ref"]["rollout"]["kv_cache_memory_bytes"] = 8 << 30
    return probe.write_config(content, folder / "grpo.yaml")


def run(device: str, small: bool, figures: dict[str, Any]) -> None:
    """Three steps; the last one's figures."""
    if importlib.util.find_spec("vllm") is None:
        raise step_outcome.NotRun("vLLM is not installed; sft shows the trainer without it")
    folder = Path(tempfile.mkdtemp())
    config = write(folder, device, small)
    run_program([*PROGRAM, "train", "--local", "--config", str(config), f"trainer.default_local_dir={folder / 'out'}"])
    last = metrics(folder / "out")[-1]
    kept = ("perf/throughput", "timing_s/", "perf/memory_gb/", "perf/memory_planned_gb/")
    figures |= {name: round(value, 4) for name, value in last.items() if name.startswith(kept)}
    assert len(metrics(folder / "out")) == STEPS


def rehearse(figures: dict[str, Any]) -> None:
    """Run one rank with the GPU's sizes on a CPU; a machine that runs it has vLLM, so no package is hidden."""
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as scratch:
        figures["rehearsed, GB"] = rehearsed(write(Path(scratch), "cuda", False, is_empty=True), "ppo")


if __name__ == "__main__":
    step_outcome.main(run)
