"""Generation that runs ahead, as users start it: bounds, faults, replay and resume, by what runs write down."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

ASYNC = "configs/async_cpu.yaml"
SMALL = (
    *("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=4"),
    *("actor_rollout_ref.rollout.max_num_seqs=24", "async_training.slice_steps=2", "trainer.n_gpus_per_node=1"),
    *("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1", "trainer.test_freq=2"),
)
ROWS = 16 * 4
MEASURED = ("timing_s/", "perf/", "reshard/", "memory/", "rollout/", "trainer/")
"""Metrics of clocks and memory, and of who waited for whom."""


def numbers(run) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in run.metrics().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


def without_staleness(run) -> list[dict[str, float]]:
    return [{name: one for name, one in line.items() if not name.startswith("staleness/")} for line in numbers(run)]


def weights(run):
    return load_file(run.run / "hf_model" / "model.safetensors")


def assert_same_bits(run, other) -> None:
    assert numbers(run) == numbers(other)
    ours, theirs = weights(run), weights(other)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def trained(folder: Path) -> Counter[tuple[str, ...]]:
    """How often each prompt was trained."""
    counts: Counter[tuple[str, ...]] = Counter()
    for file in folder.iterdir():
        counts.update(json.loads(line)["input"] for line in file.read_text().splitlines())
    return counts


def replicas(run) -> list[psutil.Process]:
    """The processes that generate: of the second pool, whose ranks are told their replica."""
    return [process for process in run.workers() if "POOL_REPLICA" in process.environ()]


def events(run, kind: str) -> list[dict]:
    file = run.run / "schedule.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if line["event"] == kind]


def test_a_run_that_lost_a_replica_is_repeated_bit_for_bit(command_line, tmp_path: Path) -> None:
    """Three steps ahead with partial rollouts. No token is older, all rows are trained, the lost replica starts again,
    and a replay has the same metrics and weights.

    Would not catch a loss inside a transfer; random kills do.
    """
    ahead = (*SMALL, "trainer.rollout_ahead=3", "trainer.total_training_steps=8")
    run = command_line(*ahead, f"trainer.rollout_data_dir={tmp_path / 'samples'}", config=ASYNC)
    run.wait_for(lambda: len(events(run, "taken")) >= 2, 300, interval=0.01)
    replicas(run)[0].kill()
    assert run.wait(300) == 0, run.text()
    assert "starts again, others go on" in run.text()
    assert len(events(run, "lost")) == 1 and run.left_over() == []
    steps = [line for line in numbers(run) if "staleness/max" in line]
    assert len(steps) == 8 and max(line["staleness/max"] for line in steps) <= 3
    assert any(line["staleness/max"] > 0 for line in steps)
    assert sum(trained(tmp_path / "samples").values()) == 8 * ROWS
    assert [one["step"] for one in events(run, "taken")] == list(range(1, 9))

    again = command_line(*ahead, f"--replay={run.run}", config=ASYNC)
    assert again.wait(300) == 0, again.text()
    assert_same_bits(again, run)


def test_no_step_ahead_is_the_synchronous_run(command_line) -> None:
    """In one process, bit for bit. Would not catch a difference that several replicas make; a longer test does."""
    small = (*SMALL, "--local", "--collapse", "trainer.total_training_steps=2", "trainer.rollout_ahead=0")
    sliced = command_line(*small, "async_training.partial_rollout=true", config=ASYNC)
    plain = command_line(*small, "async_training.partial_rollout=false", config=ASYNC)
    assert sliced.wait(200) == 0, sliced.text()
    assert plain.wait(200) == 0, plain.text()
    left = [
        {name: value for name, value in line.items() if not name.startswith("staleness/")} for line in numbers(sliced)
    ]
    assert left == numbers(plain)
    assert all(tensor.equal(weights(plain)[name]) for name, tensor in weights(sliced).items())
