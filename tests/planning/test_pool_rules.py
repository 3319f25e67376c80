"""What a user is told about placement, word for word; which rules there are is in the catalogue of faults."""

from __future__ import annotations

import pytest
from model_folders import problems, write_model

from megatron_rl.config.schema import PoolConfig

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
HYBRID = "actor_rollout_ref.hybrid_engine"
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"


def test_a_misspelt_pool_is_said_once(config):
    """The actor's, whom rollout and reference follow; and the pool that was meant is not called empty.

    Would not catch a pool that was not meant and is spelt alike.
    """
    config.pools["train"] = PoolConfig(1, 6)
    for role in (config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref):
        role.pool = "trian"
    keys = [f"actor_rollout_ref.{name}.pool" for name in ("actor", "ref", "rollout")]
    (problem,) = problems(config)
    rule = "must be a pool that is defined: global_pool, train; did you mean: "
    assert problem.startswith(" and ".join(f"{key}=trian" for key in keys))
    assert problem.endswith(rule + " ".join(f"{key}=train" for key in keys))


def test_a_critic_inherits_a_layout_that_its_pool_cannot_have(config):
    """TP2 PP3 of the actor on 4 ranks: the critic's keys, the pool's keys, the nearest. Would not catch a far one."""
    config.critic.pool, config.pools["own"] = "own", PoolConfig(2, 2)
    assert problems(config) == [
        "tp(2) * pp(3) of critic.megatron must divide the 4 ranks (pools.own.nnodes=2 * pools.own.n_gpus_per_node=2); "
        f"try: critic.megatron.{PP}=2; or see what fits: megatron-rl map --config FILE --gpus 10"
    ]
    config.critic.megatron.pipeline_model_parallel_size = 2
    assert problems(config) == []


def test_each_pool_is_checked_by_itself_and_all_at_once(config, tmp_path):
    """Stages of the critic, experts of the reward model, generation's TP. Would not catch one that hides another."""
    shared, reward = config.actor_rollout_ref, config.reward_model
    config.critic.pool, config.pools["values"] = "values", PoolConfig(1, 8)
    config.critic.megatron.tensor_model_parallel_size, config.critic.megatron.pipeline_model_parallel_size = 2, 4
    shared.rollout.pool, config.pools["gen"] = "gen", PoolConfig(1, 3)
    sizes = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    reward.enable, reward.model.path = True, write_model(tmp_path / "judge", **sizes)
    reward.enable_resource_pool, reward.nnodes, reward.n_gpus_per_node = True, 1, 6
    reward.megatron.expert_model_parallel_size, reward.megatron.pipeline_model_parallel_size = 2, 1
    path = shared.model.path
    assert problems(config) == [
        f"pp(4) must divide num_hidden_layers(6) ({path}); try: critic.megatron.{PP}=2",
        "reward_model.megatron.expert_model_parallel_size=2 needs a model with experts, and "
        f"{reward.model.path} has none; try: 1",
        f"{ROLLOUT}.{TP}=2 must divide the 3 ranks of gen (pools.gen.nnodes=1 * pools.gen.n_gpus_per_node=3); try: 1",
    ]


def test_only_roles_of_one_pool_share_a_layout(config, tmp_path):
    """Whoever is first in a pool leads it. Would not catch a key that is shared in a way not listed."""
    shared, reward = config.actor_rollout_ref, config.reward_model
    sizes = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    reward.enable, reward.model.path = True, write_model(tmp_path / "judge", **sizes)
    config.critic.pool = reward.pool = "values"
    config.pools["values"] = PoolConfig(1, 6)
    config.critic.megatron.dtype = "bfloat16"
    rule = "because all roles of values share one grid of processes"
    assert problems(config) == [
        f"reward_model.megatron.dtype=float32 must equal critic.megatron.dtype=bfloat16, {rule}; try: bfloat16"
    ]
    shared.ref.pool = "values"
    # Now the reference leads, which is built before.
    equal = "critic.megatron.dtype=bfloat16 must equal actor_rollout_ref.ref.megatron.dtype=float32"
    assert problems(config) == [f"{equal}, {rule}; try: float32"]


def test_what_a_split_rollout_allows(config):
    """The actor's parameters may rest, as nobody reads them; nothing can be dropped. Would not catch slow links."""
    shared = config.actor_rollout_ref
    shared.hybrid_engine, shared.rollout.nnodes, shared.rollout.n_gpus_per_node = False, 1, 2
    shared.actor.megatron.param_offload = True
    assert problems(config) == []


@pytest.mark.parametrize(
    ("hybrid", "pool", "nodes", "expected"),
    [
        (None, "global_pool", 0, []),
        (True, "global_pool", 0, []),
        (None, "gen", 0, []),
        (False, "gen", 0, []),
        (False, "global_pool", 1, []),
        (False, "rollout_pool", 1, []),
        (
            True,
            "gen",
            0,
            [f"{ROLLOUT}.pool=gen and {HYBRID}=true do not go together: true means that the rollout is in the "
             f"actor's pool, {ACTOR}.pool=global_pool; try: {HYBRID}=null"],
        ),
        (
            False,
            "global_pool",
            0,
            [f"{ROLLOUT}.nnodes=0 must be >= 1, as {HYBRID}=false gives the rollout a pool of its own; try: 1"],
        ),
        (
            False,
            "gen",
            1,
            [f"{ROLLOUT}.pool=gen and {ROLLOUT}.nnodes=1 both place the rollout; try: "
             f"{ROLLOUT}.nnodes=0"],
        ),
        (
            None,
            "gen",
            1,
            [f"{ROLLOUT}.nnodes=1 must be 0, as {HYBRID}=null: only false gives the rollout a pool of its own, "
             f"rollout_pool; try: 0; or set {HYBRID}=false"],
        ),
        (None, "rollout_pool", 0, [f"{ROLLOUT}.pool=rollout_pool must be a pool that is defined"]),
    ],
)  # fmt: skip
def test_verls_keys_and_ours(config, hybrid, pool, nodes, expected):
    """All ways to say where generation is. Would not catch a meaning that verl gives them elsewhere."""
    shared = config.actor_rollout_ref
    shared.hybrid_engine, shared.rollout.pool, shared.rollout.nnodes = hybrid, pool, nodes
    if pool == "gen":
        config.pools["gen"] = PoolConfig(1, 6)
    found = problems(config)
    assert len(found) == len(expected)
    assert all(problem.startswith(start) for problem, start in zip(found, expected, strict=True)), found


def test_pools_of_roles_that_are_not_there(config):
    """A key alone is no role: only a pool that is empty for it is refused. Would not catch a misspelt name then."""
    config.critic.enable, config.critic.pool = False, "nowhere"
    config.algorithm.adv_estimator = "reinforce_plus_plus"
    assert problems(config) == []
    config.critic.pool, config.pools["own"] = "own", PoolConfig(1, 2)
    assert problems(config) == [
        "pools.own.nnodes=1 and pools.own.n_gpus_per_node=2 are the size of a pool without roles; leave "
        "pools.own out, or let a role live there, such as with critic.pool=own"
    ]


def test_names_that_are_taken(config, tmp_path):
    """Of pools and of reward models. Would not catch a name that another program reserves."""
    config.pools["global_pool"] = PoolConfig(1, 6)
    (problem,) = problems(config)
    assert problem == (
        "pools.global_pool.nnodes=1 is the size of a pool that trainer.nnodes and trainer.n_gpus_per_node defines; "
        "rename the pool"
    )


def test_sizes_that_no_pool_has(config):
    """Each by its key; other rules do not divide by them. Would not catch a cluster that is too small."""
    config.critic.pool, config.pools["own"] = "own", PoolConfig(0, 10**9)
    assert problems(config) == [
        "pools.own.nnodes=0 must be >= 1 and <= 100000; try: 1",
        "pools.own.n_gpus_per_node=1000000000 must be >= 1 and <= 100000; try: 100000",
    ]
