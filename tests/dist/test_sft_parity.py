"""One batch, one update by cross-entropy: as a plain loop of transformers and torch, and the same in every layout."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from task_cases import PlainLoop, assert_equals_plain, assert_same, in_pairs, one_update, task_config, token_batch
from tiny_models import save_qwen2, save_qwen3_moe

from megatron_rl.config.tasks import SFT

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

LAYOUTS = {"TP2": (2, 2, 1), "PP2": (2, 1, 2), "TP2xPP2": (4, 2, 2), "DP2": (2, 1, 1), "TP2xDP2": (4, 2, 1)}
MICRO_BATCH = "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"
PACKED = "actor_rollout_ref__model__use_remove_padding"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_qwen2(tmp_path_factory.mktemp("model"))


def run_layout(model_path: str, world_size: int, tp_size: int, pp_size: int, **overrides) -> list[dict]:
    config = task_config(model_path, SFT, tp_size, pp_size, **{MICRO_BATCH: 4, **overrides})
    return run_ranks(world_size, one_update, config, token_batch())


@pytest.fixture(scope="module")
def alone(model_path) -> list[dict]:
    return run_layout(model_path, 1, 1, 1)


def test_one_process_equals_a_plain_loop(model_path: str, alone: list[dict]) -> None:
    """Would not catch a mask that is wrong in the file's reader, which is tested apart."""
    plain, batch = PlainLoop(model_path), token_batch()
    rows = zip(batch["input_ids"].unbind(), batch["sampled"].unbind(), strict=True)
    summed = sum(plain.log_probs(ids, len(ids) - 1)[mask[1:]].sum() for ids, mask in rows)
    told = plain.step(-summed / batch.num_sampled.sum())
    assert_equals_plain(alone, plain, told, "actor", model_path)


CASES = {
    "TP2xPP2 padded": ("TP2xPP2", {PACKED: False}),
    "TP2xDP2 packed, one pass": ("TP2xDP2", {MICRO_BATCH: 16}),
}


@pytest.mark.parametrize("case", CASES)
def test_layouts_equal_one_process(case: str, model_path: str, alone: list[dict]) -> None:
    """Every axis, both ways to lay rows out, several micro-batches and one. Would not catch an error that every layout
    shares with one process, which the plain loop does."""
    layout, overrides = CASES[case]
    assert_same(run_layout(model_path, *LAYOUTS[layout], **overrides), alone, "actor", model_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "rows", "passes"), in_pairs(LAYOUTS))
def test_all_layouts(layout: str, rows: str, passes: str, model_path: str, alone: list[dict]) -> None:
    """Every pair of an axis, a way to lay rows out, and several passes or one. Would not catch what only three of them
    together do, nor other families."""
    overrides = {PACKED: rows == "packed", MICRO_BATCH: 3 if passes == "accumulated" else 16}
    assert_same(run_layout(model_path, *LAYOUTS[layout], **overrides), alone, "actor", model_path)


MEGATRON = "actor_rollout_ref__actor__megatron__"
FURTHER = {
    "CP2": ((2, 1, 1), {f"{MEGATRON}context_parallel_size": 2}),
    "TP2xCP2": ((4, 2, 1), {f"{MEGATRON}context_parallel_size": 2}),
    "PP2, VPP2": ((2, 1, 2), {f"{MEGATRON}virtual_pipeline_model_parallel_size": 2}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", FURTHER)
def test_split_sequences_and_interleaved_stages(layout: str, model_path: str, alone: list[dict]) -> None:
    """Where each rank's head sees a part of the tokens that count, and where logits are made twice. Would not catch a
    rank that has none of a block's tokens, which is rare."""
    sizes, overrides = FURTHER[layout]
    assert_same(run_layout(model_path, *sizes, **overrides), alone, "actor", model_path)


@pytest.mark.exhaustive
def test_blocks_by_tokens(model_path: str, alone: list[dict]) -> None:
    """Would not catch blocks of unequal work."""
    overrides = {
        "actor_rollout_ref__actor__use_dynamic_bsz": True,
        "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 40,
    }
    assert_same(run_layout(model_path, *LAYOUTS["DP2"], **overrides), alone, "actor", model_path)


@pytest.mark.exhaustive
def test_expert_parallel_equals_one_process(tmp_path) -> None:
    """EP2 over DP2, and that with TP2. Would not catch an auxiliary loss, which there is none of."""
    path = save_qwen3_moe(tmp_path)
    alone = run_layout(path, 1, 1, 1)
    expert = {"actor_rollout_ref__actor__megatron__expert_model_parallel_size": 2}
    assert_same(run_layout(path, *LAYOUTS["DP2"], **expert), alone, "actor", path)
