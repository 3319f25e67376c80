"""The trainer's pass for old log-probs also gives sums of squared probabilities and entropies, if they are needed."""

from __future__ import annotations

import pytest
import torch
from plain_policy import hugging_face_model, row_log_probs
from ranks import run_ranks
from tiny_models import random_batch, run_config, save_qwen2

from megatron_rl.columns import SCORING
from megatron_rl.records import Batch

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

BOTH = {
    "algorithm__adv_estimator": "optimal_token_baseline",
    "actor_rollout_ref__actor__policy_loss__top_entropy_quantile": 0.2,
}


def scored(config) -> list[list[torch.Tensor]] | None:
    """Rows of log-probs, of sums of squares and of entropies; None before the last stage."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    sequences = random_batch(5).read_by(SCORING)
    sequences = Batch.joined([sequences, sequences[:2]])
    found = worker.roles["actor"].log_probs(sequences)
    if found is None:
        return None
    found = Batch.joined([found[:3], found[3:]])  # as answers of several ranks are joined
    columns = (found["old_log_probs"], found["sum_pi_squared"], found["entropy"])
    return [[row.clone() for row in column.unbind()] for column in columns]


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)], ids=["TP2", "PP2"])
def test_as_transformers_has_them(layout, tmp_path) -> None:
    """Within 1e-5, in the order of the rows. Would not catch a temperature that is left out."""
    path = save_qwen2(tmp_path)
    ranks = run_ranks(2, scored, run_config(path, *layout, **BOTH))
    log_probs, squares, entropies = next(found for found in reversed(ranks) if found is not None)
    model, experience = hugging_face_model(path), random_batch(5)
    rows = list(zip(experience["input_ids"].unbind(), experience.num_sampled.tolist(), strict=True))
    for number, (ids, length) in enumerate([*rows, *rows[:2]]):
        with torch.no_grad():
            expected = row_log_probs(model, ids, length)
        torch.testing.assert_close(squares[number], expected.exp().square().sum(-1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropies[number], -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=1e-5)
        chosen = expected.gather(-1, ids[-length:, None])[:, 0]
        torch.testing.assert_close(log_probs[number], chosen, atol=1e-5, rtol=1e-5)


def test_of_other_estimators_there_are_none(tmp_path) -> None:
    """Would not catch the time that they cost."""
    assert run_ranks(1, without, run_config(save_qwen2(tmp_path), 1, 1)) == [True]


def without(config) -> bool:
    """Whether scores come alone, and can be joined."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    found = worker.roles["actor"].log_probs(random_batch(4).read_by(SCORING))
    joined = Batch.joined([found[:2], found[2:]])
    return joined.names == ("old_log_probs",)
