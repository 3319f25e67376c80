"""Runs that lay rows as a trie: the numbers of a run that does not, to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
from short_runs import LOCAL, SHORT, metrics
from stage_files import command_of, keys_of
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


@pytest.mark.parametrize("stage", ["dpo", *(pytest.param(stage, marks=WEEKLY) for stage in ("sft", "reward", "kto"))])
def test_a_stage_with_tries(command_line, files: Path, stage: str) -> None:
    """Answers to one prompt, and their rewards: the losses of the first two steps to 1e-4."""
    keys = (*keys_of(files, stage), *LOCAL, "trainer.total_training_steps=2", "trainer.save_freq=-1")
    plain, trees = command_line(*keys, stage=command_of(stage)), None
    assert plain.wait() == 0, plain.text()
    trees = command_line(*keys, KEY, stage=command_of(stage))
    assert trees.wait() == 0, trees.text()
    ours, theirs = metrics(trees), metrics(plain)
    for step in (1, 2):
        losses = {name: value for name, value in theirs[step].items() if name.endswith("loss")}
        assert losses and {name: ours[step][name] for name in losses} == pytest.approx(losses, rel=1e-4, abs=1e-5)
