"""Estimators, losses and corrections that need more of a run than their formula: outputs of the model, parts of the
score, the rollout's log-probs in the place of the trainer's. In one process, on the demo's model.
"""

from __future__ import annotations

import json

import pytest
from short_runs import LOCAL, SHORT, metrics

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
ONE_STEP = (*SHORT, *LOCAL, "trainer.total_training_steps=1", "actor_rollout_ref.rollout.n=4", f"{ACTOR}.ppo_epochs=1")

PARTS = """
def parts(data_source, solution_str, ground_truth, extra_info=None):
    right = float(solution_str.strip() == str(ground_truth))
    return {"score": right, "short": -float(len(solution_str)), "right": right}
"""


def test_token_baseline_and_two_sided_weights(command_line) -> None:
    """The trainer gives sums of squares, which the estimator needs; all ratios are near 1, so nothing is left out.

    Would not catch wrong sums; tests of the head do.
    """
    run = command_line(
        *ONE_STEP,
        "algorithm.adv_estimator=optimal_token_baseline",
        "algorithm.use_kl_in_reward=false",
        f"{ACTOR}.policy_loss.loss_mode=dppo_tv",
        f"{ACTOR}.loss_agg_mode=token-sum",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_type=low_var_kl+",
        f"{ACTOR}.kl_loss_unbiased=true",
        f"{ACTOR}.policy_loss.off_policy_mask_threshold=1.0",
        f"{ACTOR}.policy_loss.top_entropy_quantile=0.2",
        "algorithm.mask_truncated_completions=true",
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_is_threshold=0.5_5.0",
        f"{CORRECTION}.rollout_rs=token_k1,seq_max_k2",
        f"{CORRECTION}.rollout_rs_threshold=0.6_1.6,2.5",
    )
    assert run.wait() == 0, run.text()
    step = metrics(run)[1]
    assert step["critic/advantages/min"] < 0 < step["critic/advantages/max"]
    assert step["actor/grad_norm"] > 0 and step["actor/ppo_kl"] == pytest.approx(0, abs=0.2)
    assert step["rollout_corr/rollout_is_oob_ratio"] == step["rollout_corr/rollout_rs_masked_fraction"] == 0
    assert step["rollout_corr/rollout_rs_seq_max_k2_masked_fraction"] == 0
    assert step["actor/off_policy_masked_fraction"] == 0
    assert 0.6 < step["actor/low_entropy_masked_fraction"] < 0.95  # of tokens that count, 0.8 of all
    assert step["rollout_corr/ppl_ratio"] == pytest.approx(1, abs=1e-3)
    assert step["rollout_corr/rollout_ppl"] > 1


def test_bypass_and_parts_of_the_score(command_line, tmp_path) -> None:
    """No pass for old log-probs; rejection by the policy's own log-probs, which are the rollout's in the first update.

    Would not catch weights of a later update; tests of losses do.
    """
    (tmp_path / "parts.py").write_text(PARTS)
    run = command_line(
        *ONE_STEP,
        f"custom_reward_function.path={tmp_path}/parts.py",
        "custom_reward_function.name=parts",
        "algorithm.adv_estimator=gdpo",
        "algorithm.gdpo_reward_keys=[right,short]",
        "algorithm.gdpo_reward_weights=[1.0,0.1]",
        "algorithm.use_kl_in_reward=false",
        f"{CORRECTION}.bypass_mode=true",
        f"{CORRECTION}.loss_type=reinforce",
        f"{CORRECTION}.rollout_is=sequence",
        f"{CORRECTION}.rollout_rs=seq_mean_k3",
        f"{CORRECTION}.rollout_rs_threshold=0.5",
    )
    assert run.wait() == 0, run.text()
    step = metrics(run)[1]
    assert "training/rollout_logprob_diff_max" not in step
    assert step["actor/grad_norm"] > 0 and step["reward/short/mean"] < 0
    assert step["critic/advantages/mean"] == pytest.approx(0, abs=1e-4)
    names = {name for name in step if name.startswith("rollout_corr/")}
    of_the_update = ("kl", "k3_kl", "chi2_token", "rollout_rs_seq_mean_k3_masked_fraction")
    of_the_update += ("rollout_rs_masked_fraction", "rollout_is_mean")
    assert names == {f"rollout_corr/{name}" for name in of_the_update}


@pytest.mark.exhaustive
def test_float16_goes_on_with_its_loss_scale(command_line) -> None:
    """A step, and one more from its checkpoint, with weights that vLLM reads as float16, too.

    Would not catch an overflow; `tests/dist/test_float16.py` does.
    """
    half = (
        f"{ACTOR}.megatron.dtype=float16",
        "actor_rollout_ref.rollout.logprob_diff_bound=0.1",
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false",
        "trainer.save_freq=1",
        "trainer.export_hf=false",
    )
    first = command_line(*ONE_STEP, *half)
    assert first.wait() == 0, first.text()
    second = command_line(*ONE_STEP, *half, "trainer.total_training_steps=2", folder=first.folder)
    assert second.wait() == 0, second.text()
    saved = [json.loads((second.run / f"global_step_{step}" / "run.json").read_text()) for step in (1, 2)]
    states = [content["roles"]["actor"] for content in saved]
    assert [(state["loss_scale"], state["good_steps"]) for state in states] == [(65536, 1), (65536, 2)]
    steps = metrics(second)
    assert list(steps) == [1, 2] and all(step["actor/loss_scale"] == 65536 for step in steps.values())
    assert all(step["actor/skipped_updates"] == 0 < step["actor/grad_norm"] for step in steps.values())
