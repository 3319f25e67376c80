"""Context parallelism before anything starts: what is refused, word for word, and what the plan counts."""

from __future__ import annotations

import pytest
from model_folders import problems

from megatron_rl.planner.batch_arithmetic import batch_table
from megatron_rl.planner.hardware import load_hardware
from megatron_rl.planner.memory import most_scored, plan_stages
from megatron_rl.planner.run_models import RunModels
from megatron_rl.planner.time import Estimator, Layout, Load, ModelCost

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"


def set_all(config, **sizes) -> None:
    """Sizes of a layout, of all roles."""
    for role in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        for name, value in sizes.items():
            setattr(role.megatron, name, value)


def test_ranks(config):
    """TP2 x CP2 x PP3 on 6 ranks and on 12; less TP rather than another CP. Would not catch a far suggestion."""
    set_all(config, context_parallel_size=2)
    (problem,) = problems(config)
    assert problem == (
        "tp(2) * cp(2) * pp(3) must divide the 6 ranks (trainer.nnodes=1 * trainer.n_gpus_per_node=6); "
        f"nearest: {MEGATRON}.tensor_model_parallel_size=1"
    )
    config.trainer.n_gpus_per_node = 12
    assert problems(config) == []


def test_ulysses_needs_heads(config):
    """12 heads over TP2 are 6: CP3 divides them, CP4 does not, and a ring takes any. Would not catch key heads, of
    which there may be any number.
    """
    config.trainer.n_gpus_per_node = 24
    set_all(config, context_parallel_size=4)
    assert problems(config) == []
    for role in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        role.megatron.override_transformer_config.cp_comm_type = "a2a"
    (problem,) = problems(config)
    key = "megatron.override_transformer_config.cp_comm_type"
    nearest = " ".join(f"{role}.{key}=p2p" for role in (ACTOR, "actor_rollout_ref.ref", "critic"))
    assert problem == (
        "cp_comm_type=a2a with cp(4) needs CP to divide the query heads of a TP rank, num_attention_heads(12) / tp(2) "
        f"= 6, of {config.actor_rollout_ref.model.path}; nearest: {nearest}; "
        "a2a goes with context_parallel_size of 1, 2, 3, 6"
    )
    config.trainer.n_gpus_per_node = 18
    set_all(config, context_parallel_size=3)
    assert problems(config) == []


def test_tokens_of_a_gpu_are_its_part(config):
    """Sequences of 64 tokens want 32 on each of two ranks. Would not catch filler, for which there is room anyway."""
    config.trainer.n_gpus_per_node = 12
    set_all(config, context_parallel_size=2)
    config.actor_rollout_ref.actor.use_dynamic_bsz = True
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 31
    (problem,) = problems(config)
    assert problem == (
        f"{ACTOR}.ppo_max_token_len_per_gpu=31 must be >= (data.max_prompt_length + data.max_response_length) / cp(2) "
        "= 64 / cp(2); nearest: 32"
    )
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 32
    assert problems(config) == []


def test_batch_table(config):
    """TP2 CP2 PP3 on 12 ranks are one share. Would not catch a share that the ranks do not get."""
    config.trainer.n_gpus_per_node = 12
    set_all(config, context_parallel_size=2)
    table = {name: value for name, value, _ in batch_table(config)}
    assert (table["CP"], table["DP"]) == ("2", "1")


@pytest.mark.parametrize(
    ("length", "response", "cp_size", "expected"),
    # Chunks of 4: 3 tokens lie in the last one, 8 in the last two, 11 in the last three, the second rank's both.
    [(16, 3, 2, 3), (16, 8, 2, 4), (16, 11, 2, 7), (16, 16, 2, 8), (16, 11, 1, 11)],
)
def test_scored_tokens_of_the_rank_with_most(length, response, cp_size, expected):
    """Would not catch prompts of several lengths: the plan takes the longest."""
    assert most_scored(length, response, cp_size) == expected


def test_memory(config):
    """CP2 on twice the ranks: the same weights, half of the optimizer's state, about half of the activations.

    Would not catch what a rank really holds; tests/dist/test_memory_plan.py does.
    """
    config.trainer.device = "cuda"
    for role in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        role.megatron.dtype = "bfloat16"
    before = plan_stages(RunModels(config))[0].phases["update_actor"]
    config.trainer.n_gpus_per_node = 12
    set_all(config, context_parallel_size=2)
    after = plan_stages(RunModels(config))[0].phases["update_actor"]
    assert after["actor parameters"] == before["actor parameters"]
    assert after["actor moments"] == pytest.approx(before["actor moments"] / 2, rel=0.02)
    assert 0.4 < after["activations"] / before["activations"] < 0.7


def test_seconds_of_the_exchange():
    """One layer of two key heads of 64 in 16 bits is 512 bytes a token. By hand for each way; nothing without CP.

    Would not catch a ring that hides its traffic: the estimate takes it not to.
    """
    hardware = load_hardware("h100")
    model = ModelCost(10**6, 10**6, 1, 256, q_size=256, kv_bytes_per_token=512)
    load = Load(8, 64, 64, 128, 8, 1024)

    def seconds(way: str, cp: int, passes: float) -> float:
        layout = Layout(cp, 8, cp=cp, cp_comm_type=way)
        estimator = Estimator(model, layout, hardware)
        return estimator._key_exchange(load.num_tokens / cp, passes) * estimator._bandwidth(False)

    tokens = load.num_tokens
    assert seconds("p2p", 1, 3) == 0.0
    assert seconds("p2p", 4, 1) == pytest.approx(tokens / 4 * 3 * 512)  # three others' keys and values
    assert seconds("all_gather", 2, 3) == pytest.approx(tokens / 2 * 512 * 4)  # once forward; once more, and float32
    assert seconds("a2a", 2, 1) == pytest.approx(tokens / 2 * (512 + 2 * 512) / 2)
    assert seconds("a2a", 2, 3) == 2 * seconds("a2a", 2, 1)
