"""Runs without a critic: none is built, computed, saved or asked for.

In one process, for how many there are changes none of this; test_text_reward_model_run.py has one through Ray.
"""

from __future__ import annotations

import json

import pytest
import torch
from command_line import REPOSITORY
from forked_run import ForkedRun
from safetensors.torch import load_file
from short_runs import LOCAL, ONE, SHORT, WITHOUT_RAY, metrics, reached, steps_saved

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]

OWN = """
from dataclasses import replace
from megatron_rl.losses.group_advantages import rloo
from megatron_rl.losses.policy import vanilla_loss
from megatron_rl.losses.rows import spread

def mine(samples, config):
    tokens = spread(rloo(samples.totals, samples.groups), samples.lengths)
    return tokens, tokens

def zero(tokens, config):
    terms = vanilla_loss(tokens, config)
    return replace(terms, loss=terms.loss * 0)
"""
ACTOR = "actor_rollout_ref.actor"
MODEL = REPOSITORY / "assets/demo/model"


@pytest.mark.exhaustive
def test_saves_and_goes_on(command_line) -> None:
    """GRPO without a reference, two steps and two more; PPO cannot go on from there, nor its critic be exported.

    Would not catch a resumed run that differs; `test_resumed_runs.py` does, with a critic.
    """
    keys = (*SHORT, *LOCAL, "trainer.save_freq=1", "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false")
    first = command_line(*keys, "trainer.total_training_steps=2")
    assert first.wait() == 0, first.text()
    assert steps_saved(first) == [2, 1]
    saved = {path.name for path in (first.run / "global_step_2").iterdir()}
    assert "actor" in saved and "critic" not in saved
    second = command_line(*keys, "trainer.total_training_steps=4", folder=first.folder)
    assert second.wait() == 0, second.text()
    assert "resuming after step 2" in second.text()
    logged = metrics(second)
    assert list(logged) == [1, 2, 3, 4]
    assert not [name for name in logged[4] if "values" in name or "vf_" in name or "kl_penalty" in name]
    assert logged[4]["actor/grad_norm"] > 0

    export = ["export", "--checkpoint", str(second.run), "--role", "critic", "--target", str(second.run / "x")]
    said = second.folder / "export.txt"
    assert ForkedRun(export, REPOSITORY, {}, said).wait() == 2
    assert "as its run trained none; try: --role actor" in said.read_text()
    ppo = command_line(*SHORT, *LOCAL, folder=first.folder)
    assert ppo.wait() == 2 and "it has no critic" in ppo.text()


APART = (*ONE, WITHOUT_RAY, "pools.ref.nnodes=1", "pools.ref.n_gpus_per_node=1", "actor_rollout_ref.ref.pool=ref")


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", [LOCAL, APART], ids=["the actor's pool", "another pool"])
def test_a_reference_that_follows_goes_on(command_line, where) -> None:
    """It becomes the policy after step 2, where the run is saved: no KL in step 3, and two steps and two more, wherever
    the reference is, are four in one process, bit for bit. Would not catch a share below 1, which tests/dist have."""
    ref = "actor_rollout_ref.ref"
    follows = (f"{ref}.sync_ref_model=true", f"{ref}.ref_model_mixup_alpha=1.0", f"{ref}.ref_model_sync_steps=2")
    grpo = ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=true", f"{ACTOR}.optim.lr=1e-3")
    keys = (*SHORT, *follows, *grpo, "trainer.save_freq=2", "trainer.test_freq=2")
    first = command_line(*keys, *where, "trainer.total_training_steps=2")
    whole = command_line(*keys, *LOCAL, "trainer.total_training_steps=4")
    assert first.wait() == 0, first.text()
    second = command_line(*keys, *where, "trainer.total_training_steps=4", folder=first.folder)
    assert second.wait() == 0 == whole.wait(), second.text() + whole.text()
    assert metrics(second) == metrics(whole)
    kl = {step: abs(logged["actor/reward_kl_penalty"]) for step, logged in metrics(whole).items()}
    assert max(kl[1], kl[3]) < 1e-5 < 1e-4 < min(kl[2], kl[4]), kl


@pytest.mark.exhaustive
def test_a_lost_reference_comes_back_as_it_was(command_line) -> None:
    """In a pool of its own, killed after step 2: from the copies in memory the run has the metrics of one process, bit
    for bit. Would not catch a checkpoint on disk, which the test above has."""
    ref = "actor_rollout_ref.ref"
    follows = (f"{ref}.sync_ref_model=true", f"{ref}.ref_model_sync_steps=1")
    keys = (*SHORT, *follows, "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=true")
    keys = (*keys, "trainer.total_training_steps=20")  # a look at all processes takes some of them
    whole, hurt = command_line(*keys, *LOCAL), command_line(*keys, *APART, "trainer.max_repairs=2")
    hurt.wait_for(reached(hurt, 2), interval=0.01)
    next(process for process in hurt.workers() if "rank 0 of ref" in " ".join(process.cmdline())).kill()
    assert hurt.wait() == 0 == whole.wait(), hurt.text() + whole.text()
    repaired = {
        step: {name: x for name, x in line.items() if "repair/" not in name} for step, line in metrics(hurt).items()
    }
    assert repaired == metrics(whole) and "repair 1 of at most 2: pool ref, rank 0" in " ".join(hurt.text().split())
    assert hurt.left_over() == []


@pytest.mark.exhaustive
def test_one_update_a_step_needs_no_pass_for_old_log_probs(command_line) -> None:
    """GRPO with a KL in the loss, with the pass and without: every metric that both have, and the weights, bit for bit.

    The pass is brought back by a veto that no token can fall under; without a shuffle both go through the samples in
    one order. Would not catch passes that are cut otherwise than the update, which may differ in the last bits.
    """
    grpo = ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false", f"{ACTOR}.use_kl_loss=true")
    rows = (
        f"{ACTOR}.shuffle=false",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    )
    keys = (*SHORT, *LOCAL, *grpo, *rows, f"{ACTOR}.ppo_epochs=1", "trainer.total_training_steps=3")
    without = command_line(*keys)
    assert without.wait() == 0, without.text()
    passing = command_line(*keys, "algorithm.rollout_correction.rollout_token_veto_threshold=1e-30")
    assert passing.wait() == 0, passing.text()
    timed = [
        [name for name in run.metrics().split('"') if name == "timing_s/old_log_prob"] for run in (without, passing)
    ]
    assert not timed[0] and len(timed[1]) == 3
    ours, theirs = metrics(without), metrics(passing)
    for step in (1, 2, 3):
        # What the veto itself reports, and memory, whose phases are others.
        extra = {name for name in theirs[step].keys() - ours[step].keys() if not name.startswith("perf/")}
        assert all("veto" in name or "rollout_rs" in name or "memory" in name for name in extra), extra
        same = [name for name in ours[step] if "memory" not in name]
        assert {name: ours[step][name] for name in same} == {name: theirs[step].get(name) for name in same}
    assert ours[3]["training/rollout_logprob_diff_max"] < 1e-4 and "rollout_corr/kl" in ours[3]
    assert "actor/reward_kl_penalty" in ours[3] and ours[3]["actor/ppo_kl"] == 0.0
    weights = [load_file(run.run / "hf_model" / "model.safetensors") for run in (without, passing)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_functions_of_the_users_and_corrections(command_line, tmp_path) -> None:
    """An estimator and a loss from a file with every correction of the rollout's samples.

    The loss is zero, so the gradient is that of the KL loss, which has none at the reference. Would not catch wrong
    advantages; tests of losses do.
    """
    (tmp_path / "own.py").write_text(OWN)
    correction = "algorithm.rollout_correction"
    run = command_line(
        *SHORT,
        *LOCAL,
        "algorithm.adv_estimator=mine",
        f"algorithm.custom_adv_estimator.path={tmp_path}/own.py",
        f"{ACTOR}.policy_loss.loss_mode=zero",
        f"{ACTOR}.policy_loss.custom.path={tmp_path}/own.py",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.ppo_epochs=1",
        f"{correction}.rollout_is=sequence",
        f"{correction}.rollout_rs=geometric",
        f"{correction}.rollout_token_veto_threshold=1e-4",
        "trainer.total_training_steps=1",
    )
    assert run.wait() == 0, run.text()
    step = metrics(run)[1]
    assert step["actor/pg_loss"] == 0 and step["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert step["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-3)
    assert step["rollout_corr/rollout_rs_masked_fraction"] == step["rollout_corr/rollout_is_veto_fraction"] == 0
    assert json.loads((run.run / "summary.json").read_text())["hf_export_logit_diff_max"] < 1e-4


NAN = """
import math
from dataclasses import replace
from megatron_rl.losses.policy import vanilla_loss

def bad(tokens, config):
    terms = vanilla_loss(tokens, config)
    return replace(terms, loss=terms.loss * math.nan)
"""


def test_a_loss_that_is_not_finite(command_line, tmp_path) -> None:
    """Two updates are skipped and counted, and the run ends well; it goes on, and the third in a row ends it, code 6.

    Would not catch one bad rank among good ones; `tests/dist/test_bad_gradient.py` does.
    """
    (tmp_path / "bad.py").write_text(NAN)
    keys = (
        *SHORT,
        *LOCAL,
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false",
        f"{ACTOR}.policy_loss.loss_mode=bad",
        f"{ACTOR}.policy_loss.custom.path={tmp_path}/bad.py",
        f"{ACTOR}.ppo_epochs=1",
        "trainer.max_skipped_updates=2",
        "trainer.save_freq=2",
    )
    run = command_line(*keys, "trainer.total_training_steps=2")
    assert run.wait() == 0, run.text()
    assert "1 update(s) of the actor skipped" in run.text()
    for step in metrics(run).values():
        assert step["actor/skipped_updates"] == 1 and "actor/pg_loss" not in step and None not in step.values()
    assert json.loads((run.run / "summary.json").read_text())["skipped_updates"] == {"actor": 2}
    original, exported = (load_file(f"{at}/model.safetensors") for at in (MODEL, run.run / "hf_model"))
    assert all(torch.equal(tensor, original[name]) for name, tensor in exported.items())
    gone_on = command_line(*keys, "trainer.total_training_steps=4", folder=run.folder)
    assert gone_on.wait() == 6, gone_on.text()
    text = gone_on.text().replace("\n", " ")
    assert "NonFiniteUpdates: 3 update(s) of the actor in a row" in text and "pg_loss=nan" in text
    assert list(metrics(gone_on)) == [1, 2] and gone_on.left_over() == []


def test_equal_rewards_in_every_group(command_line, tmp_path) -> None:
    """Dynamic sampling gives up after two batches and fills the step up; no advantage, no gradient, nothing is NaN.

    Would not catch a run that should have been stopped.
    """
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.1\n")
    run = command_line(
        *SHORT,
        *LOCAL,
        f"custom_reward_function.path={reward}",
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=2",
        "trainer.total_training_steps=1",
    )
    assert run.wait() == 0, run.text()
    step = metrics(run)[1]
    assert (step["train/num_gen_batches"], step["train/differing_groups"]) == (2, 0)
    assert step["critic/score/min"] == step["critic/score/max"] == pytest.approx(0.1)
    assert step["critic/advantages/min"] == step["critic/advantages/max"] == 0
    assert step["actor/grad_norm"] == step["actor/pg_loss"] == 0
    assert step["actor/skipped_updates"] == step["actor/empty_updates"] == 0 and None not in step.values()
