"""Passes that each have their own number of context-parallel ranks: how a batch is cut, and that rows come back.

The numbers of an update are in `tests/parity/context_rows.py`, from which the batch and its limit are.
"""

from __future__ import annotations

import pytest
import torch
from context_rows import CHOOSES, limited
from layout_keys import CP4, of_actor
from ranks import run_ranks
from tiny_models import random_batch, run_config, save_qwen2

from megatron_rl.columns import ACTOR_UPDATE, SCORING

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


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


def test_packs_of_the_batch(tmp_path) -> None:
    """Passes of one, two and four ranks, as many for every rank; every row told once; log-probs of the update come
    back whole and in order. Would not catch a plan that is uneven, which tests/parallel/test_context_packs.py does.
    """
    config = run_config(save_qwen2(tmp_path), 1, 1, **of_actor(CP4 | CHOOSES), **limited(12))
    results = run_ranks(4, own_blocks, config)
    assert {size for blocks, *_ in results for size, rows, _ in blocks if rows} == {1, 2, 4}
    assert len({len(blocks) for blocks, *_ in results}) == 1
    assert sum(rows for blocks, *_ in results for _, rows, told in blocks if told) == 11
    for _, own, before in results:
        assert torch.allclose(own, before, rtol=1e-5, atol=1e-6)
