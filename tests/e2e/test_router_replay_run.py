"""Router replay as a user gets it: by overrides, on a tiny mixture of experts, with several mini-batches and epochs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from short_runs import MEGATRON, WITHOUT_RAY, metrics
from test_several_nodes import tiny_moe

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SHORT = (
    *("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=4", f"{ROLLOUT}.n=4", "trainer.total_training_steps=2"),
    *("trainer.val_before_train=false", "trainer.test_freq=5040", "trainer.export_hf=false"),
    *(f"{ACTOR}.ppo_micro_batch_size_per_gpu=8", f"{ACTOR}.ppo_epochs=2"),
)
SMALL_STEPS = f"{ACTOR}.optim.lr=1e-12"
"""A larger one moves the rows of a gate apart by more than rounding, and nothing ties any more."""
GRPO = "configs/grpo_cpu.yaml"
DIFFERENCE, OTHERS = "training/rollout_logprob_diff_max", "training/rollout_experts_diff"


def test_the_engines_experts_are_replayed(command_line, tmp_path: Path) -> None:
    """R3 in one process, with routers that tie: the engine's log-probs are the trainer's, and without replay not.

    Would not catch a replay in the scoring pass alone: `test_router_replay.py` in tests/dist does.
    """
    from tiny_models import tie_routers

    model = tie_routers(str(tiny_moe(tmp_path / "model")))
    replays = (f"{ACTOR}.router_replay.mode=R3", f"{ACTOR}.router_replay.compare_freq=2", SMALL_STEPS)
    layout = ("trainer.n_gpus_per_node=1", f"{MEGATRON}.tensor_model_parallel_size=1", "--local")
    run = command_line(*SHORT, *replays, *layout, f"actor_rollout_ref.model.path={model}", config=GRPO)
    assert run.wait() == 0, run.text()
    first, second = metrics(run).values()
    for step in (first, second):
        assert 0 < step[DIFFERENCE] < 5e-5
        assert 1 <= step["actor/expert_load/mean"] <= step["actor/expert_load/max"] <= 3
        assert step["actor/expert_load/layer_3"] <= step["actor/expert_load/max"]
        assert step[OTHERS] > 0.01
    assert f"{DIFFERENCE}_without_replay" not in first and second[f"{DIFFERENCE}_without_replay"] > 5e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mode", "is_on_policy", "options"),
    [
        ("disabled", True, ("--local", "--collapse")),
        ("R2", True, ("--local", "--collapse")),
        ("R3", False, (WITHOUT_RAY,)),
    ],
)
def test_modes(mode, is_on_policy, options, command_line, tmp_path: Path) -> None:
    """The engine's experts are known in every mode, also where a step's only update makes the old log-probs; one
    on EP2, the others in one process. Would not catch a mode that does nothing.
    """
    keys = (f"{ACTOR}.router_replay.mode={mode}", f"{ROLLOUT}.enable_rollout_routing_replay=true")
    if is_on_policy:
        keys += (f"{ACTOR}.ppo_epochs=1", f"{ACTOR}.ppo_mini_batch_size=8")
    sizes = ("expert_model_parallel_size=2", "tensor_model_parallel_size=1")
    layout = ("trainer.n_gpus_per_node=2", *(f"{MEGATRON}.{size}" for size in sizes))
    model = f"actor_rollout_ref.model.path={tiny_moe(tmp_path / 'model')}"
    run = command_line(*SHORT, *keys, *layout, *options, model, config=GRPO)
    assert run.wait() == 0, run.text()
    for step in metrics(run).values():
        assert step[DIFFERENCE] < 5e-5 and step[OTHERS] < 0.01
    assert json.loads((run.run / "summary.json").read_text())["steps"] == 2


def test_a_dense_model_is_refused(command_line) -> None:
    """The key, the rule and the nearest choice, with code 2. Would not catch what is refused later."""
    run = command_line(f"{ACTOR}.router_replay.mode=R3")
    assert run.wait() == 2
    assert "must be disabled" in run.text() and "has no experts" in run.text()
