"""One layer of each stage stands for all: bytes of a transition and of foreign buffers against the whole plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_published_shapes import GEMMA_4, write

from megatron_rl.config.load import load_config
from megatron_rl.planning.run_models import RunModels

REPOSITORY = Path(__file__).parents[2]
DEEPSEEK, LAST = "../../tests/port/verl_scripts/models/DeepSeek-V3", "num_layers_in_last_pipeline_stage"
ACTOR, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout.tensor_model_parallel_size"


def layout(model: str, ranks: int, tp: int, pp: int, rollout_tp: int, *more: str) -> RunModels:
    """On nodes of 8."""
    sizes = [f"{ACTOR}.tensor_model_parallel_size={tp}", f"{ACTOR}.pipeline_model_parallel_size={pp}"]
    overrides = [f"actor_rollout_ref.model.path={REPOSITORY / 'configs/models' / model}", f"{ROLLOUT}={rollout_tp}"]
    overrides += [f"trainer.nnodes={max(1, ranks // 8)}", f"trainer.n_gpus_per_node={min(8, ranks)}", *sizes, *more]
    return RunModels(load_config(REPOSITORY / "configs/recipes/llama3_8b_grpo.yaml", overrides))


@pytest.mark.parametrize(
    "models",
    [
        lambda: layout("llama-3-8b", 16, 4, 2, 2),
        lambda: layout("llama-3-8b", 8, 2, 4, 1),
        lambda: layout("llama-3-8b", 8, 2, 4, 4, f"{ACTOR}.virtual_pipeline_model_parallel_size=2"),
        lambda: layout("llama-3-8b", 24, 4, 3, 2, f"{ACTOR}.num_layers_in_last_pipeline_stage=10"),
        lambda: layout("llama-3-8b", 8, 4, 2, 2, "actor_rollout_ref.rollout.drop_train_weights=true"),
        lambda: layout("qwen3-30b-a3b", 8, 2, 2, 4, f"{ACTOR}.expert_model_parallel_size=2"),
        lambda: layout(DEEPSEEK, 8, 2, 2, 4, f"{ACTOR}.expert_model_parallel_size=2", f"{ACTOR}.{LAST}=30"),
    ],
    ids=["two nodes", "one node", "chunks", "uneven", "dropped", "experts", "dense first"],
)
def test_one_layer_of_each_stage_counts_for_all(models):
    """To the element, on every rank of the group. Would not catch a layer of a kind that these models lack."""
    counts_for_all(models())


def test_layers_of_other_sizes_are_of_other_kinds(tmp_path):
    """Gemma-4's layers have parameters of equal names. Would not catch sizes that differ with the rank."""
    counts_for_all(layout(write(tmp_path / "model", GEMMA_4), 8, 2, 2, 4))


def counts_for_all(found: RunModels) -> None:
    whole, few = found.resharding.exchange, found.resharding.layers
    assert sum(few.num_layers.values()) > len(few.num_layers)
    for number, plan in enumerate(whole.plans):
        assert few.network_numel(number) == whole.numel_over_network(number)
        assert few.received_numel(number) == sum(piece.numel for piece in plan.received)
        assert few.receive_buffer_numel(number) == plan.foreign_numel
