"""The same run on one rank: whatever was shared out or placed elsewhere, preflight accepts what comes of it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.config.one_rank import collapsed
from megatron_rl.config.roles import Placement
from megatron_rl.planning.preflight import preflight

REPOSITORY = Path(__file__).parents[2]
RUNS = sorted(file for file in (REPOSITORY / "configs").glob("*.yaml") if file.stem != "ablation")
MODELS = REPOSITORY / "configs" / "models"
MEGATRON, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.stem)
def test_every_committed_run_has_one(run, monkeypatch):
    """Would not catch a run that needs more memory than one rank has."""
    monkeypatch.chdir(REPOSITORY)
    model = f"actor_rollout_ref.model.path={MODELS / 'llama-3-70b'}"
    overrides = [model] if run.stem.startswith("llama3_70b") else []
    if run.stem == "distill_cpu":  # its teacher is what the demo leaves
        overrides = ["distillation.teacher_models.carrier.model_path=assets/demo/model"]
    given = load_config(run, overrides)
    if not Path(given.actor_rollout_ref.model.path).is_dir():
        pytest.skip("its model is missing: run `python scripts/make_real_model.py`")
    before = copy.deepcopy(given)
    one = collapsed(given)
    assert list(map(str, preflight(one, config_only=True))) == []
    assert given == before
    placement = Placement.of(one)
    assert placement.world_size == 1 and list(placement.pools) == ["global_pool"]
    roles = list(placement.roles)
    assert roles == list(Placement.of(given).roles)


SPLIT = (
    f"actor_rollout_ref.model.path={MODELS / 'qwen3-30b-a3b'}",
    "data.train_files=a",
    "data.val_files=b",
    "actor_rollout_ref.hybrid_engine=false",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.tensor_model_parallel_size=4",
    f"{ROLLOUT}.kv_cache_memory_bytes=1000000",
    "data.max_prompt_length=4",
    "data.max_response_length=4",
    "pools.critic_pool.nnodes=3",
    "pools.critic_pool.n_gpus_per_node=2",
    "critic.pool=critic_pool",
    f"{MEGATRON}.tensor_model_parallel_size=2",
    f"{MEGATRON}.pipeline_model_parallel_size=2",
    f"{MEGATRON}.virtual_pipeline_model_parallel_size=2",
    f"{MEGATRON}.expert_model_parallel_size=2",
    f"{MEGATRON}.sequence_parallel=true",
    f"{MEGATRON}.dtype=bfloat16",
    f"{MEGATRON}.param_offload=true",
    f"{MEGATRON}.override_transformer_config.recompute_granularity=full",
    f"{MEGATRON}.override_transformer_config.recompute_method=uniform",
    f"{MEGATRON}.override_transformer_config.recompute_num_layers=12",
    "critic.megatron.dtype=float32",
    "critic.megatron.pipeline_model_parallel_size=3",
    "critic.megatron.virtual_pipeline_model_parallel_size=null",
    "critic.megatron.num_layers_in_first_pipeline_stage=12",
    "critic.megatron.num_layers_in_last_pipeline_stage=30",
    "critic.megatron.expert_model_parallel_size=1",
    "critic.megatron.expert_tensor_parallel_size=1",
)


def test_a_split_run_has_one(tmp_path):
    """Three pools, stages of several kinds, experts, offloading that one pool refuses. By hand, key for key.

    Would not catch a key of a layout that does not exist yet.
    """
    file = tmp_path / "run.yaml"
    file.write_text("{}\n")
    given = load_config(file, SPLIT)
    assert list(map(str, preflight(given, config_only=True))) == []
    one = collapsed(given)
    assert list(map(str, preflight(one, config_only=True))) == []
    shared = one.actor_rollout_ref
    assert (one.pools, shared.hybrid_engine, shared.rollout.nnodes, shared.rollout.pool) == ({}, None, 0, "global_pool")
    assert shared.actor.megatron.param_offload is False
    # The cache of a replica over four ranks
    assert (shared.rollout.tensor_model_parallel_size, shared.rollout.kv_cache_memory_bytes) == (1, 4_000_000)
    megatron = one.critic.megatron
    assert (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size) == (1, 1)
    assert (megatron.num_layers_in_first_pipeline_stage, megatron.virtual_pipeline_model_parallel_size) == (None, None)
    assert (megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size) == (1, 1)
    assert (megatron.sequence_parallel, megatron.dtype) == (False, "bfloat16")
    # What is no layout stays
    assert shared.actor.megatron.override_transformer_config.recompute_num_layers == 12
    assert one.data == given.data and one.algorithm == given.algorithm
    assert given.actor_rollout_ref.rollout.tensor_model_parallel_size == 4


def test_what_ran_ahead_takes_turns(tmp_path):
    """On one rank only unfinished answers outlive a step. Would not catch a bound of staleness that is lost."""
    file = tmp_path / "run.yaml"
    file.write_text("{}\n")
    ahead = ["trainer.rollout_ahead=2", "async_training.trigger_parameter_sync_step=3", "trainer.test_freq=3"]
    given = load_config(file, [*SPLIT, *ahead, "algorithm.rollout_correction.rollout_is=token"])
    assert list(map(str, preflight(given, config_only=True))) == []
    one = collapsed(given)
    assert list(map(str, preflight(one, config_only=True))) == []
    assert (one.trainer.rollout_ahead, one.async_training.partial_rollout) == (2, True)
