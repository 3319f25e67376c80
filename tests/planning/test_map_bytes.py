"""The bytes of the policy by which `map` judges transitions, against sums over all tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from placing import MODELS, REPOSITORY, request

from megatron_rl.model.families import VOCAB_PADDING, tensors_of
from megatron_rl.parallel.sharding import Place, shard_of
from megatron_rl.planning.layout_search.grids import Grid
from megatron_rl.planning.layout_search.transition_seconds import ActorBytes, rollout_shard

DEEPSEEK = next((REPOSITORY / "scripts").rglob("deepseek-v3/config.json")).parent


@pytest.mark.parametrize("model", [DEEPSEEK, MODELS / "qwen2.5-7b"], ids=["dense layers first", "layers all alike"])
@pytest.mark.parametrize("tp_size", [1, 4])
def test_bytes_of_the_policy(model: Path, tp_size: int, tmp_path: Path) -> None:
    """Layers of several kinds count each as it is; stages of one model add up to it. Would not catch a wrong place."""
    actor = request(tmp_path, 512 if model is DEEPSEEK else 8, model=model).work.actor
    place = Place(0, tp_size, VOCAB_PADDING, 0, 1, 0, tp_size)
    tensors = tensors_of(actor.model.specs).values()
    exact = sum(shard_of(tensor, place).numel for tensor in tensors) * actor.element
    assert exact <= rollout_shard(actor, tp_size) <= exact * 1.001
    policy = ActorBytes.of(actor)
    assert policy.model == sum(tensor.numel for tensor in tensors) * actor.element
    num_layers, grid = actor.sizes.num_hidden_layers, Grid(pp=actor.sizes.num_hidden_layers)
    stages = sum(policy.stage(actor, grid, rank) for rank in range(num_layers))
    assert policy.model - num_layers < stages <= policy.model
