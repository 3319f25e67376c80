"""Runs whose rollouts receive only what changed, as users start them: the same run, for fewer bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from short_runs import MEGATRON, WITHOUT_RAY, metrics
from test_async_runs import events, replicas

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

DELTAS = "actor_rollout_ref.rollout.weight_deltas=true"
SLOW = "actor_rollout_ref.actor.optim.lr=1e-6"
SMALL = (
    *("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=4"),
    *("trainer.val_before_train=false", "trainer.test_freq=5040", f"{MEGATRON}.dtype=bfloat16", WITHOUT_RAY),
)
SPLIT = (
    *("pools.critic.n_gpus_per_node=1", "critic.megatron.pipeline_model_parallel_size=1"),
    "trainer.total_training_steps=4",
)
MODEL_MB = 1.33248
AHEAD = ("trainer.n_gpus_per_node=1", f"{MEGATRON}.tensor_model_parallel_size=1", "async_training.slice_steps=2")


def logged(run, name: str) -> list[float]:
    return [line[name] for line in map(json.loads, run.metrics().splitlines()) if name in line]


def weights(run) -> dict[str, bytes]:
    file = run.run / "hf_model" / "model.safetensors"
    return {name: tensor.view(-1).numpy(force=True).tobytes() for name, tensor in floats(file).items()}


def floats(file: Path):
    """bfloat16 has no numpy, and every bfloat16 is a float32."""
    return {name: tensor.float() for name, tensor in load_file(file).items()}


def assert_deltas(run, num_steps: int) -> None:
    """After every step what changed arrives, at its bound: fewer bytes than the model has."""
    shares = logged(run, "reshard/changed_share")
    assert len(shares) == num_steps and all(0 < share < 0.1 for share in shares)
    assert logged(run, "reshard/received_mb") == logged(run, "reshard/bound_mb")
    assert max(logged(run, "reshard/received_mb")) < MODEL_MB / 4
    assert run.left_over() == []


@pytest.mark.exhaustive
def test_a_split_run_is_the_same_with_and_without(command_line) -> None:
    """The split demo in bfloat16, TP2 to two replicas, with a small learning rate: metrics and weights bit for bit. A
    tenth of the weights changes in a step at most. Would not catch a transfer that is right by chance; checksums do.
    """
    run = command_line(*SMALL, *SPLIT, SLOW, DELTAS, config="configs/split_cpu.yaml")
    whole = command_line(*SMALL, *SPLIT, SLOW, config="configs/split_cpu.yaml")
    assert run.wait() == 0, run.text()
    assert whole.wait() == 0, whole.text()
    assert metrics(run) == metrics(whole) and weights(run) == weights(whole)
    assert not logged(whole, "reshard/changed_share")
    assert_deltas(run, 4)


@pytest.mark.exhaustive
@pytest.mark.weekly
@pytest.mark.parametrize("merge", ["false", "true"], ids=["alone", "merged"])
def test_adapters_cross_as_changes_too(command_line, merge: str) -> None:
    """Alone, or merged into the weights that are sent: the bits of a run that sends everything, for fewer bytes. Would
    not catch a merge that is wrong on both ways.
    """
    keys = (*SMALL, *SPLIT, "actor_rollout_ref.model.lora.rank=4", f"actor_rollout_ref.model.lora.merge={merge}")
    keys = (*keys, "actor_rollout_ref.actor.optim.lr=1e-5")
    run = command_line(*keys, DELTAS, config="configs/split_cpu.yaml")
    whole = command_line(*keys, config="configs/split_cpu.yaml")
    assert run.wait() == 0, run.text()
    assert whole.wait() == 0, whole.text()
    assert metrics(run) == metrics(whole) and weights(run) == weights(whole)
    assert len(logged(run, "reshard/changed_share")) == 4
    received = logged(run, "reshard/received_mb")
    assert received == logged(run, "reshard/bound_mb")
    assert max(received) < 0.6 * min(logged(whole, "reshard/received_mb"))


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_a_run_ahead_that_loses_a_replica_is_repeated_without(command_line) -> None:
    """Changes arrive in second buffers beside generation; a replica is killed, everything goes once to those that are
    left and to the new replica, and then changes again. A replay that sends everything has the same bits. Would not
    catch a loss in a transfer; tests/dist/test_lost_receivers.py does.
    """
    keys = (*SMALL, *AHEAD, SLOW, "trainer.total_training_steps=10", "trainer.rollout_ahead=2")
    run = command_line(*keys, DELTAS, config="configs/async_cpu.yaml")
    run.wait_for(lambda: len(events(run, "taken")) >= 3, interval=0.01)
    replicas(run)[0].kill()
    assert run.wait() == 0, run.text()
    assert len(events(run, "lost")) == 1
    shares = logged(run, "reshard/changed_share")
    assert 3 < len(shares) < 10 and all(0 < share < 0.2 for share in shares)
    again = command_line(*keys, f"--replay={run.run}", config="configs/async_cpu.yaml")
    assert again.wait() == 0, again.text()
    assert weights(again) == weights(run)
