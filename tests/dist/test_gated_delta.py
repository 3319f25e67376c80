"""Models with layers of the gated delta rule: gradients, updates in several layouts, generation around an update.

What goes in and comes out is in `test_families_end_to_end.py`; the rule by itself in tests/model/test_delta_rule.py,
against the recurrence: transformers ignores where packed rows begin.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import run_ranks
from rollout_checks import GREEDY, RANDOM, hugging_face_greedy, logprob_difference, round_trip, tokens
from sweeps import WEEKLY, marks_of
from test_layout_parity import NUM_ROWS, assert_same, one_update, relative, run_layout, whole_weights
from test_moe_parity import EP2, ETP1, SP, hugging_face_gradients, policy_gradients
from tiny_models import random_batch, run_config
from tiny_qwen3_5 import save_qwen3_5, save_qwen3_5_moe, save_qwen3_next

from megatron_rl.columns import ACTOR_UPDATE
from megatron_rl.planning.cache_rules import KVCacheSize
from megatron_rl.planning.preflight import read_models

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

VPP2 = {"virtual_pipeline_model_parallel_size": 2}
FULL = {
    "override_transformer_config__recompute_granularity": "full",
    "override_transformer_config__recompute_method": "uniform",
    "override_transformer_config__recompute_num_layers": 1,
}
CORE = {"override_transformer_config__recompute_granularity": "selective"}
LAYOUTS = {
    save_qwen3_5: {"TP2, PP2, VPP2, SP": ((4, 2, 2), SP | VPP2), "TP2, DP2": ((4, 2, 1), {}), "PP2": ((2, 1, 2), FULL)},
    save_qwen3_5_moe: {"TP2, PP2, EP2, ETP1": ((4, 2, 2), SP | EP2 | ETP1)},
    save_qwen3_next: {"TP2, PP2, EP2, ETP1": ((4, 2, 2), SP | EP2 | ETP1 | VPP2), "core again": ((1, 1, 1), CORE)},
}
SAVED = tuple(LAYOUTS)


def swept(chosen: Callable[..., str]) -> list:
    """Parameters: the chosen model exhaustive. The others are weekly: they have the same rule in other layouts."""
    return [pytest.param(save, marks=marks_of(save, weekly={*SAVED} - {chosen})) for save in SAVED]


@pytest.mark.parametrize("save", swept(save_qwen3_next))
def test_gradients_equal_hugging_face(save, tmp_path) -> None:
    """All together within 1e-5 of their norm, before clipping, in one process, of packed rows, and each within 2e-5 of
    its largest element. From transformers' own in float64, ours of Qwen3.5 are at most 8.8e-6 and those of Qwen3-Next
    1.25e-5, transformers' in float32 1.05e-5 and 1.0e-5, so both may be 2e-5 apart. Would not catch errors of
    splitting: layouts do.
    """
    path = save(tmp_path)
    ours = whole_weights(run_ranks(1, policy_gradients, run_config(path, 1, 1)), "actor", path)
    expected = hugging_face_gradients(path)
    assert ours.keys() == expected.keys()
    squares = sum(gradient.square().sum() for gradient in expected.values())
    assert sum((ours[name] - expected[name]).square().sum() for name in ours) < 1e-10 * squares
    far = {name: relative(gradient, expected[name]) for name, gradient in ours.items() if expected[name].any()}
    assert max(far.values()) < 2e-5 and len(far) > len(ours) - 6
    assert not any(gradient.any() for name, gradient in ours.items() if name not in far)


@pytest.mark.parametrize("save", swept(save_qwen3_5_moe))
def test_layouts_equal_one_process(save, tmp_path) -> None:
    """Scores, gradient norms and an update, of actor and critic. Would not catch an error in one process, too."""
    path = save(tmp_path)
    reference = run_layout(path, 1, 1, 1)
    for ranks, sizes in LAYOUTS[save].values():
        assert_same(run_layout(path, *ranks, **sizes), reference, path, norms=3e-6)


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_packed_rows_equal_padded_ones(tmp_path) -> None:
    """Scores and an update, of actor and critic. Would not catch an error of both."""
    path = save_qwen3_5(tmp_path)
    assert_same(run_layout(path, 1, 1, 1), run_ranks(1, one_update, padded(path)), path)


def padded(path):
    """The configuration of `run_layout` in one process, with rows that are filled up."""
    from test_layout_parity import OPTIMIZER

    optimizer = {f"actor_rollout_ref__actor__optim__{key}": value for key, value in OPTIMIZER.items()}
    optimizer |= {f"critic__optim__{key}": value for key, value in OPTIMIZER.items()}
    return run_config(path, 1, 1, **optimizer, actor_rollout_ref__model__use_remove_padding=False)


def around_an_update(config, exported: Path) -> tuple[list, list]:
    """Greedy answers before an update and after, log-prob differences of engine and trainer; the updated folder."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    before, _ = round_trip(worker, GREEDY)
    far = [logprob_difference(worker, before)]
    rows = random_batch(NUM_ROWS)[worker.groups.dp_rank :: worker.groups.grid.dp_size]
    rows.add(old_log_probs=rows["advantages"].clone())
    worker.roles["actor"].update(rows.read_by(ACTOR_UPDATE))
    after, _ = round_trip(worker, GREEDY)
    drawn, _ = round_trip(worker, RANDOM)
    far += [logprob_difference(worker, after), logprob_difference(worker, drawn)]
    worker.roles["actor"].export_hf(exported)
    return [tokens(before), tokens(after)], far


CASES = [
    pytest.param(save_qwen3_5, (1, 1, 1), {}, id="qwen3_5"),
    pytest.param(save_qwen3_5_moe, (2, 2, 1), SP | EP2 | ETP1, id="qwen3_5_moe", marks=WEEKLY),
    pytest.param(save_qwen3_next, (4, 2, 2), SP, id="qwen3_next", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("save", "ranks", "sizes"), CASES)
def test_generation_around_an_update(save, ranks, sizes, tmp_path) -> None:
    """Tokens equal transformers' on what goes in and what comes out, log-probs the trainer's within 5e-5, with states
    given back and taken again in between. Would not catch a rare tie.
    """
    path = save(tmp_path / "model")
    keys = {"actor_rollout_ref__actor__optim__lr": 0.01}
    keys |= {f"actor_rollout_ref__actor__megatron__{key}": value for key, value in sizes.items()}
    results = run_ranks(ranks[0], around_an_update, run_config(path, *ranks[1:], **keys), tmp_path / "exported")
    before, after = hugging_face_greedy(path), hugging_face_greedy(str(tmp_path / "exported"))
    assert before != after
    for answers, far in results:
        assert answers == [before, after]
        assert all(one is None or one < 5e-5 for one in far)


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
