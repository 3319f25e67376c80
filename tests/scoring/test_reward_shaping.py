"""What reward models' scores count: statistics in their folders, running ones, limits; and what a checkpoint keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_rl.checkpoint.score_statistics import (
    FILE,
    ScoreStatistics,
    StatisticsError,
    read_statistics,
    saved_statistics,
    write_statistics,
)
from megatron_rl.scoring.outcome import Outcome, Sample
from megatron_rl.scoring.scored_answers import ModelScores, ScoredAnswers, combine
from megatron_rl.scoring.shaping import ModelShaping, RewardShaping, RunningMoments, overlong_penalty


def test_moments_of_batches_are_those_of_all():
    """1, 3, then 5: mean 3, sample variance (4 + 0 + 4) / 2. Would not catch a loss of digits over many batches, which
    the second half looks at: scores around a million, in uneven batches, against one pass over all."""
    moments = RunningMoments()
    moments.add(torch.tensor([1.0, 3.0]))
    assert (moments.mean, moments.std) == (2.0, pytest.approx(2**0.5))
    moments.add(torch.tensor([]))
    moments.add(torch.tensor([5.0]))
    assert (moments.count, moments.mean, moments.std) == (3, 3.0, 2.0)
    scores, moments = torch.randn(1000, generator=torch.Generator().manual_seed(0)) + 1e6, RunningMoments()
    for part in scores.split([1, 2, 497, 500]):
        moments.add(part)
    assert moments.mean == pytest.approx(float(scores.double().mean()), rel=1e-14)
    assert moments.std == pytest.approx(float(scores.double().std()), rel=1e-9)


def test_shapes_by_hand():
    """Held-out mean 1 and spread 0.5; clipped to [-1, 2]; a running one that counts its own batch first, and one that
    only looks. Would not catch a model that is shaped as another."""
    shaping = RewardShaping(
        {
            "fixed": ModelShaping("a", fixed=(1.0, 0.5)),
            "clipped": ModelShaping("a", fixed=(1.0, 0.5), clip=(-1.0, 2.0)),
            "limits": ModelShaping("a", clip=(-1.0, 2.0)),
            "running": ModelShaping("a", is_running=True),
        }
    )
    scores = torch.tensor([0.0, 1.5, 4.0])
    assert shaping("other", scores, scores) is None
    assert shaping("fixed", scores, scores).rewards.tolist() == [-2.0, 1.0, 6.0]
    clipped = shaping("clipped", scores, scores)
    assert clipped.rewards.tolist() == [-1.0, 1.0, 2.0] and clipped.is_clipped.tolist() == [True, False, True]
    assert shaping("limits", scores, scores).rewards.tolist() == [0.0, 1.5, 2.0]
    assert shaping("running", torch.tensor([1.0, 3.0, 5.0]), torch.tensor([1.0, 3.0, 5.0])).rewards.tolist() == [
        -1.0,
        0.0,
        1.0,
    ]
    assert shaping("running", torch.tensor([7.0]), torch.tensor([])).rewards.tolist() == [2.0]
    assert shaping("running", torch.tensor([3.0]), torch.tensor([3.0])).rewards.tolist() == [0.0]
    assert shaping.metrics()["reward/running/running_mean"] == 3.0
    equal = RewardShaping({"running": ModelShaping("a", is_running=True)})
    assert equal("running", torch.tensor([0.3]), torch.tensor([0.3])).rewards.tolist() == [0.0]
    assert equal("running", torch.tensor([0.3, 0.3]), torch.tensor([0.3, 0.3])).rewards.tolist() == [0.0, 0.0]
    rounded = torch.tensor([3.0, 3.0 + 2**-22])  # equal but for rounding: no scores of unit size
    assert equal("running", rounded, rounded).rewards.abs().max() < 1.1


def test_running_moments_go_on_bit_for_bit():
    """Through JSON, as in run.json. A model of another folder begins anew. Would not catch a run that saves another
    state than that after its step."""
    batches = [torch.randn(7, generator=torch.Generator().manual_seed(seed)) * 3.7 for seed in range(4)]
    whole, resumed = (RewardShaping({"one": ModelShaping("a", is_running=True)}) for _ in range(2))
    for batch in batches[:2]:
        whole("one", batch, batch)
    saved = json.loads(json.dumps(whole.state_dict()))
    resumed.load_state_dict(saved)
    for batch in batches[2:]:
        expected, found = (shaping("one", batch, batch).rewards for shaping in (whole, resumed))
        assert torch.equal(expected, found)
    assert resumed.state_dict() == whole.state_dict()
    other = RewardShaping({"one": ModelShaping("b", is_running=True), "two": ModelShaping("a", fixed=(0.0, 1.0))})
    other.load_state_dict(saved | {"unknown": 1})
    assert other.metrics() == {"reward/one/running_mean": 0.0, "reward/one/running_std": 1.0}
    other.load_state_dict({})  # of a run before there was such a state


def test_what_counts_and_what_was_said_are_told_apart():
    """The score is the shaped one times its weight; tables have both. Would not catch a weight inside the limits."""
    ruled = ScoredAnswers(torch.ones(2), [Sample("unit", text, "x", {}) for text in "ab"], [Outcome(1.0)] * 2, None)
    scores = torch.tensor([3.0, 40.0])
    shaped = RewardShaping({"reward_model": ModelShaping("a", fixed=(1.0, 2.0), clip=(-5.0, 5.0))})
    model = ModelScores("reward_model", scores, 0.5, shaped=shaped("reward_model", scores, scores))
    found = combine(ruled, [model], rule_weight=2.0)
    assert found.scores.tolist() == [2.5, 4.5]
    row = found.table(["q"] * 2, step=1)[1]
    assert (row["score"], row["rm_score"], row["rm_reward"], row["rm_clipped"]) == (4.5, 40.0, 5.0, 1.0)
    assert found.metrics()["reward/rm_clipped/mean"] == 0.5


def test_statistics_of_a_folder(tmp_path: Path):
    """Our file first, else OpenRLHF's keys in config.json. Would not catch statistics of another model's scores."""
    (tmp_path / "config.json").write_text('{"mean": -1.5, "std": 2, "vocab_size": 9}')
    assert read_statistics(tmp_path) == ScoreStatistics(-1.5, 2.0)
    write_statistics(tmp_path, ScoreStatistics(0.1 + 0.2, 1e-3))
    assert read_statistics(tmp_path) == ScoreStatistics(0.1 + 0.2, 1e-3)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", "{}", "it has no reward_statistics.json, and its config.json no mean and std"),
        ("config.json", '{"mean": 1}', "its config.json has mean=1, std=None, which must be finite numbers"),
        (FILE, '{"mean": 1, "std": 0}', "mean=1, std=0, which must be finite numbers, the second > 0"),
        (FILE, '{"mean": 1, "std": NaN}', "std=nan"),
        (FILE, '{"mean": true, "std": 1}', "mean=True"),
        (FILE, "[1, 2]", "its reward_statistics.json is not an object in braces"),
        (FILE, "{", "its reward_statistics.json is not valid JSON"),
        ("other", "{}", "its config.json cannot be read: No such file"),
    ],
)
def test_useless_statistics_are_refused(tmp_path: Path, file: str, content: str, said: str):
    """Would not catch a file that changes while a run starts."""
    (tmp_path / file).write_text(content)
    with pytest.raises(StatisticsError, match=said.replace("[", r"\[")):
        read_statistics(tmp_path)


def test_statistics_of_a_checkpoint():
    """Only those of the validation after its own step. Would not catch a step that was counted wrongly."""
    last = {"val/score/mean": 0.5, "val/score/std": 2.0}
    saved = {"step": 4, "held_out": {"last": last, "last_step": 4}}
    assert saved_statistics(saved) == ScoreStatistics(0.5, 2.0)
    assert saved_statistics(saved | {"step": 5}) is None
    assert saved_statistics({"step": 4}) is saved_statistics({"step": 4, "held_out": {"last": last}}) is None
    assert saved_statistics({"step": 4, "held_out": {"last": {"val/loss": 1.0}, "last_step": 4}}) is None


def test_overlong_penalty_by_hand():
    """At most 10 tokens, the last 4 of them penalised up to 0.5. Would not catch lengths without their end token."""
    found = overlong_penalty(torch.tensor([1, 6, 7, 9, 10]), max_length=10, buffer=4, factor=0.5)
    assert found.tolist() == pytest.approx([0.0, 0.0, -0.125, -0.375, -0.5])
    assert found.dtype == torch.float32
