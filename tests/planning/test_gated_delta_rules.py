"""Models with layers of the gated delta rule: what is refused, word for word, and what their cache takes."""

from __future__ import annotations

import pytest
from fault import base_config, good_case
from model_folders import problems

from megatron_rl.planning.cache_rules import KVCacheSize
from megatron_rl.planning.preflight import read_models

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LORA, MEGATRON = "actor_rollout_ref.model.lora", f"{ACTOR}.megatron"
QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "sliding_window": None,
    "use_sliding_window": None,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "full_attention_interval": 2,
}


@pytest.fixture
def case(tmp_path):
    """Six ranks, TP2 x PP3, six layers, every second of which is linear."""
    (tmp_path / "base").mkdir()
    made = good_case(tmp_path, base_config(tmp_path / "base"), experts=False)
    made.model(**QWEN3_5)
    return made


def in_words(case) -> list[str]:
    """The violations, with the folder's name shortened."""
    return [text.replace(str(case.folder), "FOLDER") for text in problems(case.config)]


def test_such_a_model_is_allowed(case):
    """With a cache that has room for states. Would not catch a rule that is missing."""
    assert in_words(case) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"linear_num_key_heads": 1}, "tp(2) must divide linear_num_key_heads(1)"),
        (
            {"linear_num_value_heads": 3},
            "linear_num_value_heads=3 of FOLDER/model/config.json must be a multiple of linear_num_key_heads(2)",
        ),
        ({"layer_types": ["linear_attention"] * 6}, "must leave at least one layer of full_attention"),
        ({"layer_types": ["full_attention"] * 5}, "must name the kind of each of the 6 layers"),
        ({"layer_types": ["sliding_attention"] * 6}, "sliding_attention is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate=false of FOLDER/model/config.json is not supported"),
        (
            {"linear_conv_kernel_dim": 0},
            "linear_conv_kernel_dim=0 of FOLDER/model/config.json must be whole numbers >= 1",
        ),
    ],
)
def test_sizes_that_do_not_fit(changes, expected, case):
    """Of config.json, and against TP. Would not catch a size that only vLLM's kernels refuse."""
    case.model(**changes)
    found = in_words(case)
    assert any(expected in text for text in found), found


def test_context_ranks_share_the_heads_of_keys(case):
    """Two heads over TP2 leave one, which CP2 does not divide; four do. Would not catch a head that two ranks read."""
    case.set({f"{MEGATRON}.context_parallel_size": 2, "trainer.n_gpus_per_node": 12})
    (problem,) = in_words(case)
    rule, way_out = problem.split("; try: ")
    assert rule.endswith(
        ".context_parallel_size=2 must divide linear_num_key_heads(2) / tp(2) = 1, of FOLDER/model: context-parallel "
        "ranks exchange tokens for heads"
    )
    assert f"{MEGATRON}.context_parallel_size=1" in way_out
    case.model(**QWEN3_5 | {"linear_num_key_heads": 4})
    assert in_words(case) == []


def test_a_request_takes_blocks_for_states(case):
    """By hand, at rollout TP2 in float32: blocks grow until a state fits, and short sequences cost as much as that.

    A token has 2 x 3 heads of 32 in each of three layers, 2304 bytes. A state has 3 x 192 elements of the convolution
    and 2 x 64 x 64 of the rule, 35072 bytes a layer, so a page has 64 tokens.
    """
    case.set({f"{ROLLOUT}.tensor_model_parallel_size": 2})
    sizes = read_models(case.config, config_only=True)[0][0]
    cache = KVCacheSize.at(sizes, 2, 4, "cpu")
    assert (cache.block_size, cache.block_bytes) == (64, 64 * 3 * 768)
    assert (cache.blocks(1), cache.blocks(64), cache.blocks(65)) == (3, 3, 4)
    assert cache.needed_bytes(65) == 5 * cache.block_bytes
    assert cache.num_sequences(13 * cache.block_bytes, 65) == 3
    assert cache.num_tokens(5 * cache.block_bytes) == 128
    case.set({f"{ROLLOUT}.kv_cache_memory_bytes": cache.needed_bytes(48) - 1})
    assert any("must be >= " in text and f"{ROLLOUT}.kv_cache_memory_bytes" in text for text in in_words(case))
