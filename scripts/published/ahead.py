"""The package's plan of a run that generates ahead, for seconds that are estimated elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron_rl.config.load import load_config
from megatron_rl.planning.async_estimate import ahead_plan
from megatron_rl.planning.memory import GEN, RESHARD
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.step_load import Load
from megatron_rl.planning.step_time import StepTime
from megatron_rl.planning.time import Estimator

RECIPE = Path(__file__).parents[2] / "configs" / "recipes" / "qwen2.5_7b_grpo.yaml"
"""Any run that generates: only its numbers of ranks and its rules of running ahead are read."""
ROLLOUT = "actor_rollout_ref.rollout"
FIXED = (
    "trainer.n_gpus_per_node=1",
    f"{ROLLOUT}.n_gpus_per_node=1",
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.model.path=configs/models/qwen2.5-7b",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
    "async_training.partial_rollout=true",
)


def seconds_ahead(
    drawer: Estimator, load: Load, training_gpus: int, ahead: int, in_turns: Mapping[str, float]
) -> float:
    """Seconds of a step that draws answers `ahead` steps early on the drawer's GPUs, while the others train.

    in_turns: seconds of "transition", "generation" and "training", if none ran beside another.
    """
    layout = drawer.layout
    overrides = {
        "trainer.nnodes": training_gpus,
        f"{ROLLOUT}.nnodes": layout.num_gpus,
        f"{ROLLOUT}.tensor_model_parallel_size": layout.rollout_tp,
        "trainer.rollout_ahead": ahead,
    }
    config = load_config(RECIPE, [*FIXED, *(f"{key}={value}" for key, value in overrides.items())])
    seconds = {RESHARD: in_turns["transition"], GEN: in_turns["generation"], "training": in_turns["training"]}
    time = StepTime(seconds, dict.fromkeys(seconds, ("all",)), tuple((phase,) for phase in seconds))
    plan = ahead_plan(config, RunModels(config), drawer, load, time)
    assert plan is not None  # it generates ahead, on ranks of its own
    return plan.ahead_s
