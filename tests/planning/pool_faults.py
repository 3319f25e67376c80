"""Faults of placement, for the catalogue: pools and roles, and verl's keys and ours that contradict each other."""

from __future__ import annotations

from random import Random

from fault import CP, GPUS, MEGATRON, MODULES, PP, ROLLOUT, TP, WAY, Case, Said, fault, values
from model_folders import write_model

from megatron_rl.config.load import load_config
from megatron_rl.config.schema import PoolConfig

HYBRID, PLACED = "actor_rollout_ref.hybrid_engine", "placement layout critic"
REWARDED = f"{PLACED} reward_model reward_model.nnodes model length"


def put_pool(case: Case, name: str, nodes: int = 1, ranks: int = 6) -> None:
    case.config.pools[name] = PoolConfig(nodes, ranks)


def put_reward_model(case: Case) -> None:
    path = write_model(case.folder / "classifier", architectures=["Qwen2ForSequenceClassification"], num_labels=1)
    case.set({"reward_model.enable": True, "reward_model.model.path": path})


def put_further(case: Case, name: str) -> None:
    """A further reward model whose keys follow others', as from a file."""
    path = write_model(case.folder / "further", architectures=["Qwen2ForSequenceClassification"], num_labels=1)
    file = case.folder / "further.yaml"
    file.write_text("data: {train_files: a, val_files: b}\nactor_rollout_ref: {model: {path: m}}\n")
    given = ["trainer.device=cpu", f"reward_models.x.model.path={path}", f"{TP}=2", f"{PP}=3", f"{GPUS}=6"]
    case.config.reward_models[name] = load_config(file, given).reward_models["x"]


@fault(PLACED)
def unknown_pool(case: Case, rng: Random) -> list[Said]:
    case.set({"critic.pool": "globl_pool"})
    return [("critic.pool", "must be a pool that is defined: global_pool")]


@fault("placement", offer=False, experts=None)
def pool_without_role(case: Case, rng: Random) -> list[Said]:
    put_pool(case, "spare")
    return [("pools.spare.nnodes", "without roles")]


@fault("placement", offer=False, experts=None)
def taken_name(case: Case, rng: Random) -> list[Said]:
    put_pool(case, rng.choice(["rollout_pool", "reward_pool"]))
    [name] = case.config.pools
    return [(f"pools.{name}.nnodes", "is the size of a pool that")]


@fault(PLACED)
def pool_without_ranks(case: Case, rng: Random) -> list[Said]:
    put_pool(case, "own", nodes=rng.choice([0, -3]))
    case.set({"critic.pool": "own"})
    return [("pools.own.nnodes", "must be >= 1 and <= 100000")]


@fault(PLACED)
def inherited_tp(case: Case, rng: Random) -> list[Said]:
    put_pool(case, "own", ranks=3)
    case.set({"critic.pool": "own"})
    return [("critic.megatron.tensor_model_parallel_size", "must divide the 3 ranks (pools.own.nnodes=1")]


@fault(PLACED)
def rollout_tp_of_another_pool(case: Case, rng: Random) -> list[Said]:
    put_pool(case, "gen", ranks=3)
    case.set({f"{ROLLOUT}.pool": "gen"})
    return [(f"{ROLLOUT}.tensor_model_parallel_size", "must divide the 3 ranks of gen")]


@fault(PLACED)
def hybrid_rollout_elsewhere(case: Case, rng: Random) -> list[Said]:
    put_pool(case, "gen")
    case.set({HYBRID: True, f"{ROLLOUT}.pool": "gen"})
    return [(f"{ROLLOUT}.pool", "do not go together")]


@fault(PLACED)
def no_nodes_for_the_rollout(case: Case, rng: Random) -> list[Said]:
    case.set({HYBRID: False})
    return [(f"{ROLLOUT}.nnodes", "must be >= 1, as actor_rollout_ref.hybrid_engine=false")]


@fault(PLACED)
def two_pools_for_the_rollout(case: Case, rng: Random) -> list[Said]:
    put_pool(case, "gen")
    case.set({HYBRID: False, f"{ROLLOUT}.pool": "gen", f"{ROLLOUT}.nnodes": 2})
    return [(f"{ROLLOUT}.pool", "both place the rollout")]


@fault("placement", experts=None)
def nodes_for_nothing(case: Case, rng: Random) -> list[Said]:
    case.set({f"{ROLLOUT}.nnodes": 2, HYBRID: rng.choice([None, True])})
    return [(f"{ROLLOUT}.nnodes", "must be 0, as actor_rollout_ref.hybrid_engine=")]


@fault(REWARDED)
def no_nodes_for_the_reward_model(case: Case, rng: Random) -> list[Said]:
    put_reward_model(case)
    case.set({"reward_model.enable_resource_pool": True})
    return [("reward_model.nnodes", "must be >= 1, as reward_model.enable_resource_pool=true")]


@fault(REWARDED)
def reward_nodes_for_nothing(case: Case, rng: Random) -> list[Said]:
    put_reward_model(case)
    case.set({"reward_model.nnodes": 1})
    return [("reward_model.nnodes", "must be 0, as reward_model.enable_resource_pool=false")]


@fault(REWARDED)
def two_pools_for_the_reward_model(case: Case, rng: Random) -> list[Said]:
    put_reward_model(case)
    put_pool(case, "judges")
    changes = {"reward_model.enable_resource_pool": True, "reward_model.pool": "judges", "reward_model.nnodes": 1}
    case.set(changes)
    return [("reward_model.pool", "both place the reward model")]


@fault(REWARDED, offer=False)
def role_of_the_same_name(case: Case, rng: Random) -> list[Said]:
    name = rng.choice(["critic", "rollout"])
    put_further(case, name)
    return [(f"reward_models.{name}.model.path", "is a role already")]


@fault(REWARDED, offer=False)
def name_that_is_none(case: Case, rng: Random) -> list[Said]:
    put_further(case, "my model")
    return [("reward_models.my model.model.path", "is a Python identifier")]


@fault(REWARDED)
def further_model_on_another_grid(case: Case, rng: Random) -> list[Said]:
    put_further(case, "helpful")
    key = "reward_models.helpful.megatron.tensor_model_parallel_size"
    case.set({key: 1})
    return [(key, "must equal actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2")]


@fault(REWARDED)
def further_model_of_another_dtype(case: Case, rng: Random) -> list[Said]:
    put_further(case, "helpful")
    put_pool(case, "judges")
    case.set({"reward_models.helpful.pool": "judges", "reward_models.helpful.megatron.dtype": "float8"})
    return [("reward_models.helpful.megatron.dtype", "must be one of float32, bfloat16")]


# Megatron's options
DDP = f"{MEGATRON}.override_ddp_config"
OVERLAPS, BUCKET = (f"{DDP}.{name}" for name in ("overlap_grad_reduce", "bucket_size"))
values("no bucket", "ddp", {BUCKET: 0, OVERLAPS: True}, (BUCKET, "or >= 1"))
values("parts of nothing", "layout", {MODULES: ["mlp"]}, (MODULES, "must be null, or"))

# Context parallelism: 6 ranks TP2 x PP3, 12 heads
values("no cp", "layout", {CP: 0}, (CP, "must be >= 1"))
values("cp", "layout", {CP: 4}, (TP, "must divide the 6 ranks"), experts=False)
values("heads of a2a", "layout", {CP: 4, GPUS: 24, WAY: "a2a"}, (WAY, "query heads of a TP rank"), experts=False)
values("way of cp", "layout", {WAY: "ring"}, (WAY, "must be one of p2p, all_gather, a2a"))
