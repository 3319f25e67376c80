"""One batch, one update by cross-entropy: as a plain loop of transformers and torch, and the same in every layout.

Why the layout cannot matter: the loss is the sum of the counted tokens' negative log-probs, divided by their number in
the whole batch. That number is known before the first pass, so a pass adds its tokens' terms whatever others hold, and
the rest is as in `tests/parity`. A padded token and a prompt's token weigh nothing.

Not exercised: a rank without a counted token in a pass of context parallelism; other families than Qwen2 and Qwen3-MoE.
"""

from __future__ import annotations

import pytest
from layout_keys import LOSSES
from ranks import run_ranks
from task_cases import PlainLoop, assert_equals_plain, assert_same, in_pairs, one_update, task_config, token_batch
from tiny_models import save_qwen2, save_qwen3_moe

from megatron_rl.config.tasks import SFT

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

LAYOUTS = {"TP2xPP2": (4, 2, 2), "TP2xDP2": (4, 2, 1)}
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


@pytest.mark.parametrize(("layout", "rows", "passes"), in_pairs(LAYOUTS, ("TP2xDP2", "packed", "at once")))
def test_layouts_equal_one_process(layout: str, rows: str, passes: str, model_path: str, alone: list[dict]) -> None:
    """Every pair of an axis, a way to lay rows out, and several passes or one. Would not catch what only three of them
    together do, nor an error that every layout shares with one process, which the plain loop does."""
    overrides = {PACKED: rows == "packed", MICRO_BATCH: 3 if passes == "accumulated" else 16}
    assert_same(run_layout(model_path, *LAYOUTS[layout], **overrides), alone, "actor", model_path)


MEGATRON = "actor_rollout_ref__actor__megatron__"
VPP2 = {f"{MEGATRON}virtual_pipeline_model_parallel_size": 2}


def up_to(cp_size: int, tokens: int) -> dict:
    """Each pass over as few ranks as its tokens need, at most so many on a rank."""
    return {
        f"{MEGATRON}context_parallel_size": cp_size,
        f"{MEGATRON}dynamic_context_parallel": True,
        "actor_rollout_ref__actor__use_dynamic_bsz": True,
        "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": tokens,
    }


AS_TRIES = {"actor_rollout_ref__model__enable_tree_training": True}
FURTHER = {
    "TP2xCP2": ((4, 2, 1), {f"{MEGATRON}context_parallel_size": 2}),
    "PP2, VPP2": ((2, 1, 2), VPP2),
    "up to CP4": ((4, 1, 1), up_to(4, 12)),
    "up to CP2 of 4 ranks": ((4, 1, 1), up_to(2, 16)),
    "PP2, VPP2, up to CP2": ((4, 1, 2), VPP2 | up_to(2, 16)),
    "DP2, as tries": ((2, 1, 1), AS_TRIES),
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
    assert_same(run_layout(model_path, 2, 1, 1, **overrides), alone, "actor", model_path)


EXPERTS = {"EP2": (2, {}), "up to CP2, EP2": (2, up_to(2, 16))}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", EXPERTS)
@pytest.mark.parametrize("balance", ["none", "losses"])
def test_expert_parallel_equals_one_process(layout: str, balance: str, tmp_path) -> None:
    """With losses of routers, which change the norm, or none. Would not catch a loss that is wrong in one process,
    which `test_balanced_routers.py` has by its formula for the same code."""
    path, (ranks, changes) = save_qwen3_moe(tmp_path), EXPERTS[layout]
    losses = {f"{MEGATRON}{key}": value for key, value in LOSSES.items()} if balance == "losses" else {}
    alone = run_layout(path, 1, 1, 1, **losses)
    expert = {f"{MEGATRON}expert_model_parallel_size": 2}
    assert_same(run_layout(path, ranks, 1, 1, **expert, **changes, **losses), alone, "actor", path)
    told = alone[0]["actor"]
    assert ("actor/moe_aux_loss/mean" in told) == ("actor/expert_load/max" in told) == bool(losses)
    plain = run_layout(path, 1, 1, 1)[0]["actor"]
    assert (told["actor/grad_norm"] == plain["actor/grad_norm"]) == (not losses)
