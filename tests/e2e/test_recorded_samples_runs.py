"""A run that records its samples, and runs that train on them: the same, and with another learning rate and loss."""

from __future__ import annotations

import hashlib

import pytest
from short_runs import JUDGED, LOCAL, SHORT, metrics

from megatron_rl.observe.sample_files import read_step, recorded_files

pytestmark = pytest.mark.slow

STEPS = ("trainer.total_training_steps=2", "trainer.recorded_prompts=-1", *LOCAL)
STALE = (
    *("trainer.rollout_ahead=1", "async_training.partial_rollout=true", "async_training.slice_steps=1"),
    *("actor_rollout_ref.rollout.over_sample_rate=0.3", "algorithm.rollout_correction.rollout_is=token"),
)
LATE = "rollout/late_groups"
"""The only metric here that is of generation and not of a clock."""


def digests(run):
    """Of the trained model and of the recorded samples, with everything that the steps computed of them."""
    files = [run.run / "hf_model/model.safetensors", *recorded_files(run.run).values()]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@pytest.mark.parametrize(
    ("keys", "further"),
    [((), ()), (STALE, ()), (JUDGED, ("reward_model.judge.recorded=true",))],
    ids=["synchronous", "stale", "judged"],
)
def test_recorded_samples_train_the_same_model_bit_for_bit(command_line, recorded, keys, further):
    """Weights, metrics and every number of every token, also of tokens that earlier weights sampled, and with verdicts
    of a judge that is not started again. Would not catch a difference on several ranks.
    """
    first = recorded("all samples", *SHORT, *STEPS, *keys)
    again = command_line(*SHORT, *STEPS, *keys, *further, "--rollouts-from", str(first.run))
    assert again.wait() == 0, again.text()
    trained = {step: {name: line[name] for name in line if name != LATE} for step, line in metrics(first).items()}
    assert metrics(again) == trained and digests(again) == digests(first)
    assert all(read_step(file).is_whole for file in recorded_files(first.run).values())
    assert max(line.get("staleness/max", 0) for line in trained.values()) == (1 if keys == STALE else 0)
    judged = [line.get("reward/rm_unparsed/mean", 1.0) for line in trained.values()]
    assert (max(judged) < 1) == (keys == JUDGED), judged


def test_recorded_samples_can_be_argued_with(command_line, recorded):
    """Another loss and learning rate: the same tokens, other weights. Would not catch a loss without an effect."""
    first = recorded("all samples", *SHORT, *STEPS)
    keys = ("actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.actor.policy_loss.loss_mode=cispo")
    other = command_line(*SHORT, *STEPS, *keys, "--rollouts-from", str(first.run))
    assert other.wait() == 0, other.text()
    one, two = ([read_step(file) for file in recorded_files(run.run).values()] for run in (first, other))
    for step, (mine, theirs) in enumerate(zip(one, two, strict=True)):
        assert (mine.columns["input_ids"] == theirs.columns["input_ids"]).all()
        assert (mine.columns["old_log_probs"] == theirs.columns["old_log_probs"]).all() == (step == 0)
    assert digests(other)[0] != digests(first)[0]
