"""Settings of short runs, and readers of the metrics and checkpoints that one run leaves over several starts."""

from __future__ import annotations

import json

from command_line import CommandLine

from megatron_rl.checkpoint.folders import find
from megatron_rl.checkpoint.manifest import broken_files, read_manifest

MEGATRON = "actor_rollout_ref.actor.megatron"
SHORT = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "algorithm.kl_ctrl.type=adaptive",
    "trainer.val_before_train=false",
    "trainer.test_freq=5040",
    "trainer.total_training_steps=5",
)
ONE = ("trainer.n_gpus_per_node=1", *(f"{MEGATRON}.{axis}_model_parallel_size=1" for axis in ("tensor", "pipeline")))
TP2 = ("trainer.n_gpus_per_node=2", f"{MEGATRON}.pipeline_model_parallel_size=1")
LOCAL = (*ONE, "--local")
"""The whole run in one process, without Ray: the same numbers, as test_resumed_runs.py proves."""
WITHOUT_RAY = "trainer.launcher=local"
"""Ranks are processes of this machine, which a supervisor starts: with Ray's bits, as test_resumed_runs.py proves."""
JUDGED = (
    *("reward_model.enable=true", "reward_model.model.path=assets/demo/model", "reward_model.judge.scale=[0,999]"),
    *('reward_model.judge.prompt="{response}+{question}"', "reward_model.judge.max_prompt_length=40"),
    *("reward_model.judge.temperature=1", "reward_model.judge.max_response_length=8"),
)
"""A judge: the demo's own model, whose sums are numbers of a scale."""
CLOCKED = ("timing_s/", "perf/", "reshard/")
"""Metrics that measure the machine."""


def metrics(run: CommandLine) -> dict[int, dict[str, float]]:
    """Step -> what was logged, without clocks; each step once, in order."""
    lines = [json.loads(line) for line in run.metrics().splitlines()]
    steps = [line.pop("step") for line in lines]
    assert steps == sorted(set(steps))
    kept = [{name: value for name, value in line.items() if not name.startswith(CLOCKED)} for line in lines]
    return dict(zip(steps, kept, strict=True))


def steps_saved(run: CommandLine) -> list[int]:
    """Steps of the checkpoints, newest first; each must be complete to the last byte."""
    found = find(run.run)
    for checkpoint in found:
        assert broken_files(checkpoint.path, read_manifest(checkpoint.path), checksums=True) == []
    return [checkpoint.step for checkpoint in found]


def reached(run: CommandLine, step: int):
    """A condition: the metrics of `step` are written."""
    return lambda: f'"step": {step}, ' in run.metrics()
