"""Runs that lay rows as a trie: the numbers of a run that does not, to rounding."""

from __future__ import annotations

import pytest
from short_runs import LOCAL, SHORT, metrics
from sweeps import WEEKLY

pytestmark = [pytest.mark.dist, pytest.mark.exhaustive, pytest.mark.timeout(600)]

KEY = "actor_rollout_ref.model.enable_tree_training=true"
NAMES = ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "training/rollout_probs_diff_mean", "critic/score/mean")


@pytest.mark.parametrize(
    "config",
    ["configs/demo_cpu.yaml", pytest.param("configs/agents/guess.yaml", marks=WEEKLY)],
    ids=["demo", "turns"],
)
def test_a_run_with_tries(command_line, config: str) -> None:
    """Two steps, dynamic passes: the first has the other run's metrics to 1e-4, the second follows from it. Would not
    catch an error that two steps do not show.
    """
    keys = (*SHORT, *LOCAL, "trainer.total_training_steps=2", "actor_rollout_ref.actor.use_dynamic_bsz=true")
    keys = (*keys, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512")
    plain, trees = command_line(*keys, config=config), None
    assert plain.wait() == 0, plain.text()
    trees = command_line(*keys, KEY, config=config)
    assert trees.wait() == 0, trees.text()
    ours, theirs = metrics(trees), metrics(plain)
    shared = [name for name in NAMES if name in theirs[1]]
    assert len(shared) >= 4
    for name in shared:
        assert ours[1][name] == pytest.approx(theirs[1][name], rel=1e-4, abs=1e-5), name
    assert ours[2].keys() == theirs[2].keys() and trees.left_over() == []
