"""Context parallelism before anything starts: what is refused, word for word, and what the plan counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_folders import problems

from megatron_rl.planning.batch_arithmetic import batch_rows
from megatron_rl.planning.hardware import load_hardware
from megatron_rl.planning.layout_sizes import Layout
from megatron_rl.planning.memory import MemoryOfStage, plan_stages
from megatron_rl.planning.memory_advice import cutting_sequences
from megatron_rl.planning.memory_report import (
    LongestSequence,
    longest_sequence,
    memory_report,
    usable_bytes,
    with_longest,
)
from megatron_rl.planning.role_ledger import most_scored
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.step_load import Load
from megatron_rl.planning.time import Estimator, ModelCost

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
        f"try: {MEGATRON}.tensor_model_parallel_size=1; or see what fits: megatron-rl map --config FILE --gpus 6"
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
        f"= 6, of {config.actor_rollout_ref.model.path}; try: {nearest}; "
        "a2a goes with context_parallel_size of 1, 2, 3, 6"
    )
    config.trainer.n_gpus_per_node = 18
    set_all(config, context_parallel_size=3)
    assert problems(config) == []


def test_tokens_of_a_gpu_are_its_part(config):
    """Batch of 64 tokens want 32 on each of two ranks. Would not catch filler, for which there is room anyway."""
    config.trainer.n_gpus_per_node = 12
    set_all(config, context_parallel_size=2)
    config.actor_rollout_ref.actor.use_dynamic_bsz = True
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 31
    (problem,) = problems(config)
    assert problem == (
        f"{ACTOR}.ppo_max_token_len_per_gpu=31 must be >= (data.max_prompt_length + data.max_response_length) / cp(2) "
        "= 64 / cp(2); try: 32"
    )
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 32
    assert problems(config) == []


def test_batch_table(config):
    """TP2 CP2 PP3 on 12 ranks are one share. Would not catch a share that the ranks do not get."""
    config.trainer.n_gpus_per_node = 12
    set_all(config, context_parallel_size=2)
    table = {name: value for name, value, _ in batch_rows(config)}
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
    near = replace(model, windows=((5, 1),))
    load = Load(8, 64, 64, 128, 8, 1024)

    def seconds(way: str, cp: int, passes: float, model: ModelCost = model) -> float:
        layout = Layout(cp, 8, cp=cp, cp_comm_type=way)
        estimator = Estimator(model, layout, hardware)
        return estimator._key_exchange(load.num_tokens / cp, passes, 64) * estimator._bandwidth(False)

    tokens = load.num_tokens
    assert seconds("p2p", 1, 3) == 0.0
    assert seconds("p2p", 4, 1) == pytest.approx(tokens / 4 * 3 * 512)  # three others' keys and values
    assert seconds("all_gather", 2, 3) == pytest.approx(tokens / 2 * 512 * 4)  # once forward; once more, and float32
    assert seconds("a2a", 2, 1) == pytest.approx(tokens / 2 * (512 + 2 * 512) / 2)
    # With a window of 5 a chunk reads 4 keys of the one before: 6 of 7 such pairs are of two ranks, each of 16 tokens.
    assert seconds("p2p", 4, 1, near) == pytest.approx(tokens / 4 * 512 * (6 * 4) / (4 * 16))
    # In 10 tokens half of the queries see 5 keys; without a window these see 2.5 more on average, a quarter of all.
    assert near.attention_flops(10) == 0.75 * model.attention_flops(10)
    assert seconds("all_gather", 4, 1, near) == seconds("all_gather", 4, 1)
    assert seconds("a2a", 2, 3) == 2 * seconds("a2a", 2, 1)


def set_dynamic(config, cp_size: int) -> None:
    """Passes by tokens that choose over how many ranks they go, of all roles."""
    set_all(config, context_parallel_size=cp_size, dynamic_context_parallel=True)
    shared = config.actor_rollout_ref
    for settings, name in (
        (shared.actor, "use_dynamic_bsz"),
        (shared.rollout, "log_prob_use_dynamic_bsz"),
        (shared.ref, "log_prob_use_dynamic_bsz"),
        (config.critic, "use_dynamic_bsz"),
    ):
        setattr(settings, name, True)
    set_limits(config, 64 // cp_size)


def set_limits(config, tokens: int) -> None:
    """Tokens of a pass on a rank, of all roles."""
    shared = config.actor_rollout_ref
    for settings, name in (
        (shared.actor, "ppo_max_token_len_per_gpu"),
        (shared.rollout, "log_prob_max_token_len_per_gpu"),
        (shared.ref, "log_prob_max_token_len_per_gpu"),
        (config.critic, "ppo_max_token_len_per_gpu"),
        (config.critic, "forward_max_token_len_per_gpu"),
    ):
        setattr(settings, name, tokens)


def test_passes_that_choose(config):
    """CP up to 2 on 12 ranks is fine by tokens, packed; word for word what is not. Would not catch a missing rule."""
    config.trainer.n_gpus_per_node = 12
    set_dynamic(config, 2)
    assert problems(config) == []
    config.actor_rollout_ref.actor.use_dynamic_bsz = False
    config.critic.use_dynamic_bsz = False
    config.actor_rollout_ref.model.use_remove_padding = False
    packed, by_tokens = problems(config)
    assert "use_remove_padding=false do not go together: rows that are filled up to the longest are all" in packed
    assert packed.endswith("try: actor_rollout_ref.model.use_remove_padding=true")
    assert "do not go together: the tokens of a pass determine over how many ranks it is split" in by_tokens
    assert by_tokens.endswith(f"try: {ACTOR}.use_dynamic_bsz=true critic.use_dynamic_bsz=true")


def test_one_rank_has_nothing_to_choose(config):
    """Asked for without a size, as verl's scripts do, it is not ignored. Would not catch a hint of a wrong size."""
    set_dynamic(config, 1)
    found = problems(config)
    assert any("context_parallel_size is the most ranks that share a sequence" in problem for problem in found), found


def test_a_power_of_two_of_ranks_may_share(config):
    """CP3 on 18 ranks, which a fixed size allows. Would not catch a nearest size that the ranks refuse."""
    config.trainer.n_gpus_per_node = 18
    set_dynamic(config, 3)
    set_limits(config, 64)
    (problem,) = problems(config)
    roles = (ACTOR, "actor_rollout_ref.ref", "critic")
    given = " and ".join(f"{role}.megatron.context_parallel_size=3" for role in roles)
    nearest = " ".join(f"{role}.megatron.context_parallel_size=2" for role in roles)
    assert problem == (
        f"{given} must be a power of two with dynamic_context_parallel=true: a pass uses 1, 2, 4 ... of these ranks; "
        f"try: {nearest}"
    )


def test_all_ranks_get_the_rows_of_passes_that_choose(config):
    """TP2 PP3 on 24 ranks, of which 4 hold the same weights and 2 share at most; the table says as much.

    Would not catch groups that torch makes otherwise; tests/dist/test_dynamic_context.py does.
    """
    config.trainer.n_gpus_per_node = 24
    set_dynamic(config, 2)
    grid = RunModels(config).grid
    assert (grid.cp_size, grid.dp_size, grid.pack_sizes) == (4, 1, [1, 2])
    assert grid.pack_groups(2)[:4] == [[0, 2], [4, 6], [1, 3], [5, 7]]
    table = {name: value for name, value, _ in batch_rows(config)}
    assert (table["CP"], table["DP"]) == ("up to 2", "2")
    config.actor_rollout_ref.actor.megatron.dynamic_context_parallel = False
    grid = RunModels(config).grid
    assert (grid.cp_size, grid.dp_size, grid.pack_sizes) == (2, 2, [])


def test_memory_of_passes_that_choose(config):
    """A rank holds no more tokens than where all sequences are cut, but may score all of them: a short answer is whole.

    Would not catch what a rank really holds; tests/dist/test_memory_plan.py does.
    """
    config.trainer.n_gpus_per_node = 12
    set_dynamic(config, 2)
    chosen = MemoryOfStage(RunModels(config), "global_pool", 2)
    role = chosen.roles[0]
    block = chosen.pool.ledger(role).passes("update").block
    assert (block.tokens, block.response_tokens, block.is_packed) == (32, 32, True)
    set_all(config, dynamic_context_parallel=False)
    fixed = MemoryOfStage(RunModels(config), "global_pool", 2)
    block = fixed.pool.ledger(fixed.roles[0]).passes("update").block
    assert (block.tokens, block.response_tokens, block.is_packed) == (32, 32, False)


def test_the_longest_sequence_that_fits(config):
    """One token more does not fit, and twice the ranks take about twice as much; positions and cache bound it, too.

    Would not catch a plan that is wrong; the measured peaks of tests/dist/test_memory_plan.py would.
    """
    config.trainer.device = "cuda"
    config.trainer.n_gpus_per_node = 24
    config.actor_rollout_ref.model.override_config.max_position_embeddings = 1 << 20
    set_dynamic(config, 2)
    set_all(config, dynamic_context_parallel=False, dtype="bfloat16")
    config.actor_rollout_ref.rollout.kv_cache_memory_bytes = 10**8
    hardware = replace(load_hardware("h100"), memory_bytes=5 * 10**8, context_bytes=0)

    def longest() -> LongestSequence:
        models = RunModels(config)
        return longest_sequence(config, models, memory_report(config, models, hardware))

    found = longest()
    assert found.limited_by == "memory" and found.tokens > 1000
    usable = usable_bytes(hardware)
    peaks = [
        max(stage.peak for stage in plan_stages(RunModels(with_longest(config, found.tokens + more))))
        for more in (0, 1)
    ]
    assert peaks[0] <= usable < peaks[1]
    set_all(config, context_parallel_size=4)
    assert 1.7 < longest().tokens / found.tokens < 2.1
    config.actor_rollout_ref.model.override_config.max_position_embeddings = 512
    path = config.actor_rollout_ref.model.path
    assert longest() == LongestSequence(512, f"max_position_embeddings of {path}")
    config.actor_rollout_ref.rollout.kv_cache_memory_bytes = 10**5
    assert longest().limited_by == "the KV cache"


def test_advice_to_cut_sequences(config):
    """The least size that fits, with a rank's part of the longest sequence in every pass by tokens.

    Would not catch advice that is slower than another; the notes say what else would do.
    """
    config.trainer.device = "cuda"
    config.trainer.n_gpus_per_node = 24
    config.actor_rollout_ref.model.override_config.max_position_embeddings = 1 << 20
    config.data.max_response_length = 8176
    set_dynamic(config, 1)
    set_all(config, dynamic_context_parallel=False, dtype="bfloat16")
    config.actor_rollout_ref.rollout.kv_cache_memory_bytes = 10**8
    set_limits(config, 8192)
    peaks = {}
    for cp_size in (1, 2, 4):
        set_all(config, context_parallel_size=cp_size)
        set_limits(config, 8192 // cp_size)
        peaks[cp_size] = max(stage.peak for stage in plan_stages(RunModels(config)))
    set_all(config, context_parallel_size=1)
    set_limits(config, 8192)
    for fits, fails in ((2, 1), (4, 2)):
        room = (peaks[fits] + peaks[fails]) // 2
        hardware = replace(load_hardware("h100"), memory_bytes=int(room / 0.95), context_bytes=0)
        change = cutting_sequences(config, RunModels(config), hardware)
        assert change is not None and change.peak == peaks[fits]
        assert change.settings[f"{MEGATRON}.context_parallel_size"] == fits
        assert change.settings[f"{ACTOR}.ppo_max_token_len_per_gpu"] == 8192 // fits
    nothing = replace(load_hardware("h100"), memory_bytes=1000, context_bytes=0)
    assert cutting_sequences(config, RunModels(config), nothing) is None
