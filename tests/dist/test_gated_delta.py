"""The cache of models with layers of the gated delta rule; what they give is in `tests/parity`."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from rollout_checks import GREEDY, round_trip, tokens
from sweeps import WEEKLY
from tiny_models import run_config
from tiny_qwen3_5 import save_qwen3_5

from megatron_rl.planning.cache_rules import KVCacheSize
from megatron_rl.planning.preflight import read_models

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


def blocks_of_the_engine(config) -> tuple[int, int, int]:
    """Tokens of a block, bytes of a block and number of blocks, after the longest prompt has been answered."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    answers, _ = round_trip(worker, GREEDY)
    assert max(map(len, tokens(answers))) == GREEDY.max_tokens
    engine = worker.roles["rollout"].generator.llm.llm_engine
    cache = engine.model_executor.driver_worker.worker.model_runner.kv_cache_config
    pages = {group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in cache.kv_cache_groups}
    return engine.vllm_config.cache_config.block_size, max(pages), cache.num_blocks


@pytest.mark.parametrize("interval", [pytest.param(2, marks=WEEKLY), pytest.param(4, marks=pytest.mark.exhaustive)])
def test_the_planned_cache_is_the_engines(interval, tmp_path) -> None:
    """With states larger than a page: blocks as planned, and the smallest cache that the plan allows answers a prompt.

    Would not catch that more sequences fit than planned.
    """
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 96, "full_attention_interval": interval}
    path = save_qwen3_5(tmp_path, **sizes)
    config = run_config(path, 1, 1, data__max_prompt_length=150, data__max_response_length=12)
    planned = KVCacheSize.of(config, read_models(config, config_only=True)[0][0])
    needed = planned.needed_bytes(162)
    config = run_config(
        path,
        1,
        1,
        data__max_prompt_length=150,
        data__max_response_length=12,
        actor_rollout_ref__rollout__kv_cache_memory_bytes=needed,
    )
    ((block_size, block_bytes, num_blocks),) = run_ranks(1, blocks_of_the_engine, config)
    assert (block_size, block_bytes) == (planned.block_size, planned.block_bytes) and block_size > 32
    assert num_blocks == planned.blocks(162) + 1
