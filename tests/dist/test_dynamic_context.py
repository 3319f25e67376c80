"""Passes that each have their own number of context-parallel ranks: one batch, one update, one process's numbers.

Why: within a pass the argument is that of `test_context_parallel.py`. Every sequence is in one pass, reported once by
the ranks that share it, and a rank without a sequence adds a pass that weighs nothing; so sums over passes and ranks
have each token once, whatever the sizes are. Not exercised: long sequences; kernels of CUDA; whether time is saved.

The 11 sequences have 8 to 19 tokens: a limit of 12 tokens on a rank takes packs of one, two and four ranks, and one of
14 on four ranks, of which at most two share a pack, packs of one and two, and a rank that is idle for a pass.
"""

from __future__ import annotations

import pytest
import torch
from layout_keys import LOSSES
from ranks import run_ranks
from sweeps import often
from test_context_parallel import A2A, ACTOR, ALL_GATHER, CP, EP2, ETP1, FULL, MEGATRON, P2P, SELECTIVE, SP, VPP2
from tiny_models import random_batch, run_config, save_qwen2, save_qwen3_moe
from updates import OPTIMIZER, assert_same, one_update

from megatron_rl.columns import ACTOR_UPDATE, SCORING

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


def limited(tokens: int) -> dict:
    """Packs of their own size, of at most so many tokens on a rank."""
    return {
        f"{MEGATRON}__dynamic_context_parallel": True,
        f"{ACTOR}__use_dynamic_bsz": True,
        f"{ACTOR}__ppo_max_token_len_per_gpu": tokens,
    }


LAYOUTS = {
    "up to CP4, p2p": ((4, 1, 1), 4, P2P | limited(12)),
    "up to CP2 of 4 ranks, all_gather": ((4, 1, 1), 2, ALL_GATHER | limited(14)),
    "TP2, up to CP2, SP, a2a, selective": ((4, 2, 1), 2, A2A | SP | SELECTIVE | limited(12)),
    "PP2, up to CP2, p2p, full": ((4, 1, 2), 2, P2P | FULL | limited(12)),
    "PP2, VPP2, up to CP2, all_gather": ((4, 1, 2), 2, ALL_GATHER | VPP2 | limited(12)),
}
"""Name -> (ranks, tp, pp), largest cp, further keys."""
MOE_LAYOUTS = {
    "up to CP2 of 4 ranks, EP2, p2p": ((4, 1, 1), 2, P2P | EP2 | limited(14)),
    "TP2, up to CP2, EP2, ETP1, SP, all_gather": ((4, 2, 1), 2, ALL_GATHER | EP2 | ETP1 | SP | limited(12)),
    "PP2, up to CP2, EP2, p2p": ((4, 1, 2), 2, P2P | EP2 | limited(14)),
}
OFTEN = ("PP2, up to CP2, EP2, p2p",)
"""What `make test` goes through, beside `test_packs_of_the_batch`."""


def run_layout(path: str, ranks: tuple[int, int, int], cp_size: int, changes: dict) -> list[dict]:
    """`one_update` on every rank, all of which get all rows."""
    world_size, tp_size, pp_size = ranks
    keys = {f"{role}__optim__{key}": value for role in (ACTOR, "critic") for key, value in OPTIMIZER.items()}
    results = run_ranks(world_size, one_update, run_config(path, tp_size, pp_size, **keys, **{CP: cp_size}, **changes))
    assert {r["where"].dp_size for r in results} == {1}
    assert sum(r["where"].dp_collector for r in results) == 1
    return results


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model_path) -> list[dict]:
    return run_ranks(1, one_update, run_config(model_path, 1, 1, **optimizers()))


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory) -> str:
    return save_qwen3_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def moe_reference(moe_path) -> list[dict]:
    return run_ranks(1, one_update, run_config(moe_path, 1, 1, **optimizers()))


def optimizers() -> dict:
    return {f"{role}__optim__{key}": value for role in (ACTOR, "critic") for key, value in OPTIMIZER.items()}


@pytest.mark.parametrize("layout", often(LAYOUTS, OFTEN))
def test_layouts_equal_one_process(layout, model_path, reference) -> None:
    """Scores, metrics, norms before clipping and new weights of actor and critic. Would not catch passes that are all
    cut alike, which `test_packs_of_the_batch` looks at, nor lost time.
    """
    assert_same(run_layout(model_path, *LAYOUTS[layout]), reference, model_path)


@pytest.mark.parametrize("layout", often(MOE_LAYOUTS, OFTEN))
def test_moe_layouts_equal_one_process(layout, moe_path, moe_reference) -> None:
    """Ranks that work on other sequences need each other's experts."""
    assert_same(run_layout(moe_path, *MOE_LAYOUTS[layout]), moe_reference, moe_path)


@pytest.mark.exhaustive
def test_routers_are_balanced_as_in_one_process(moe_path) -> None:
    """Losses of routers are means over rows of which ranks have different ones. Would not catch what one process gets
    wrong, too.
    """
    losses = {f"{MEGATRON}__{key}": value for key, value in LOSSES.items()}
    reference = run_ranks(1, one_update, run_config(moe_path, 1, 1, **optimizers(), **losses))
    ranks, cp_size, changes = MOE_LAYOUTS["up to CP2 of 4 ranks, EP2, p2p"]
    assert_same(run_layout(moe_path, ranks, cp_size, changes | losses), reference, moe_path)


def own_blocks(config) -> tuple[list[tuple[int, int, bool]], torch.Tensor | None, torch.Tensor]:
    """(of every pass of one rank: ranks that share it, its rows, whether it tells), log-probs of an update that makes
    the old ones itself, those of a pass before it.
    """
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    actor, experience = worker.roles["actor"], random_batch(11)
    batch = experience.read_by(ACTOR_UPDATE)
    batch.add(old_log_probs=None)
    blocks = actor.trainable.pipeline.micro_batches(batch, actor.cut)
    before = actor.log_probs(experience.read_by(SCORING))
    _, scores = actor.update_on_policy(batch)
    found = [(block.num_sharing, len(block.rows), block.is_reported) for block in blocks]
    return found, scores.flat("old_log_probs"), before.flat("old_log_probs")


def test_packs_of_the_batch(model_path) -> None:
    """Passes of one, two and four ranks, as many for every rank; every row told once; log-probs of the update come
    back whole and in order. Would not catch a plan that is uneven, which tests/parallel/test_context_packs.py does.
    """
    config = run_config(model_path, 1, 1, **{CP: 4}, **limited(12))
    results = run_ranks(4, own_blocks, config)
    assert {size for blocks, *_ in results for size, rows, _ in blocks if rows} == {1, 2, 4}
    assert len({len(blocks) for blocks, *_ in results}) == 1
    assert sum(rows for blocks, *_ in results for _, rows, told in blocks if told) == 11
    for _, own, before in results:
        assert torch.allclose(own, before, rtol=1e-5, atol=1e-6)
