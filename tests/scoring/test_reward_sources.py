"""Reward models for some sources of prompts alone: what is refused, and whose answers each one scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_rl.config.load import read_config
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.scoring.outcome import Outcome, Sample
from megatron_rl.scoring.scored_answers import ModelScores, ScoredAnswers, combine
from megatron_rl.scoring.sources import check_sources

DEMO = Path(__file__).parents[2] / "configs" / "demo_cpu.yaml"
SOURCES = {"chat", "code", "math"}
MODELS = ("reward_model.enable=true", "reward_model.model.path=a", "reward_models.strict.model.path=b")
NO_RULE = ("custom_reward_function.path=null", "custom_reward_function.name=null")


def config(*overrides: str) -> RunConfig:
    return read_config(DEMO, [*MODELS, *overrides])[0]


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        ((), []),
        (NO_RULE, []),
        ((*NO_RULE, "reward_model.data_sources=[chat]"), []),  # the other scores all
        (("reward_model.data_sources=[chat]", "reward_models.strict.data_sources=[code,chat]"), ["math"]),
        (("reward_model.data_sources=[chat]", "reward_models.strict.weight=0"), ["code", "math"]),
        ((*NO_RULE, "reward_model.data_sources=[chat,math]", "reward_models.strict.data_sources=[code]"), []),
    ],
)
def test_every_answer_has_a_score(overrides, notes):
    """A source may be the rule's alone, which is said. Would not catch a rule that gives every such answer 0."""
    said = check_sources(config(*overrides), SOURCES)
    assert said == [
        f"responses to prompts of data source {name} are scored only by the reward function" for name in notes
    ]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            (*NO_RULE, "reward_model.data_sources=[chat]", "reward_models.strict.data_sources=[math]"),
            "reward_model.data_sources=['chat'] and reward_models.strict.data_sources=['math'] leave responses to "
            "prompts of code without a score: no reward model scores them, and there is no reward function; "
            "try: reward_model.data_sources=['chat', 'code']",
        ),
        (
            ("reward_model.rule_weight=0", "reward_model.data_sources=[chat,code]", "reward_models.strict.weight=0"),
            "reward_model.data_sources=['chat', 'code'] leave responses to prompts of math without a score: no reward "
            "model scores them, and reward_model.rule_weight=0; "
            "try: ['chat', 'code', 'math']",
        ),
        (
            ("reward_models.strict.data_sources=[maths,chat]",),
            "reward_models.strict.data_sources=['maths', 'chat'] must be sources of prompts, and none has maths in "
            "column data.reward_fn_key=data_source; there are chat, code, math; did you mean: ['math', 'chat']",
        ),
    ],
)
def test_sources_that_cannot_be(overrides, said):
    """Would not catch a source whose prompts are all too long to be used."""
    with pytest.raises(ConfigError) as refused:
        check_sources(config(*overrides), SOURCES)
    assert str(refused.value) == f"this run cannot start: {said}"


def test_scores_of_some_rows():
    """1 * rule + 0.5 * the model of rows 2 and 0 + 2 * that of row 1. A row has no column of a model that does not
    score it. Would not catch rows that are chosen wrongly."""
    samples = [Sample("unit", text, "x", {}) for text in ("one", "two", "three")]
    ruled = ScoredAnswers(torch.tensor([1.0, 2.0, 3.0]), samples, [Outcome(value) for value in (1.0, 2.0, 3.0)], None)
    first = ModelScores("reward_model", torch.tensor([4.0, 8.0]), 0.5, rows=torch.tensor([2, 0]))
    second = ModelScores("strict", torch.tensor([-1.0]), 2.0, rows=torch.tensor([1]))
    found = combine(ruled, [first, second], rule_weight=1.0)
    assert found.scores.tolist() == [5.0, 0.0, 5.0]
    assert found.variables()["rm_score"] == [8.0, None, 4.0] and found.variables()["strict_score"] == [None, -1.0, None]
    assert found.metrics()["reward/rm_score/mean"] == 6.0
    bad = ModelScores("strict", torch.tensor([float("nan")]), 2.0, rows=torch.tensor([1]))
    with pytest.raises(RewardError, match="the reward model strict gives nan to a prompt of .*response 'two'"):
        combine(ruled, [first, bad], rule_weight=1.0)
