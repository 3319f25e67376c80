"""docs/reference/python_api.md: its code is loaded and called as a run does it, and its tables have every field."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from megatron_rl.agents.observation import Observation, TextLimit, Turn, observation_of
from megatron_rl.agents.tools import load_tools, schemas_of
from megatron_rl.config.keys import is_key
from megatron_rl.config.schema import ActorConfig, AlgorithmConfig
from megatron_rl.config.user_functions import load_class, load_function
from megatron_rl.data.prompt_sampler import METHODS
from megatron_rl.losses.estimators import Samples
from megatron_rl.losses.policy import PolicyTerms, PolicyTokens
from megatron_rl.scoring.function import RewardSource
from megatron_rl.scoring.group_function import Group, GroupFacts, GroupRewardSource, row_of
from megatron_rl.scoring.outcome import Sample
from megatron_rl.scoring.sampled_batch import SampledBatch
from megatron_rl.scoring.user_verdict import VerdictSource

PAGE = Path(__file__).parents[2] / "docs/reference/python_api.md"
FIELDS = {
    "Environment": (Turn, Observation),
    "Scorer": (SampledBatch,),
    "Advantage estimator": (Samples,),
    "Policy loss": (PolicyTokens, PolicyTerms),
}


def section(title: str) -> str:
    return PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.fixture
def file(tmp_path, request) -> str:
    """The code block of the section that a test names, as a file."""
    path = tmp_path / "mine.py"
    path.write_text(re.search(r"```python\n(.*?)```", section(request.param), re.S)[1])
    return str(path)


@pytest.mark.parametrize("title", FIELDS)
def test_tables_have_every_field(title):
    """Would not catch a description that is wrong."""
    named = {name for row in re.findall(r"^\| (`.*?) \|", section(title), re.M) for name in re.findall(r"`(\w+)`", row)}
    named -= {"Observation"}  # the head of a table
    properties = {"totals", "prompts"}  # read as the fields are
    assert named - properties == {field.name for kind in FIELDS[title] for field in dataclasses.fields(kind)}


def test_keys_exist():
    """Those of the first table. Would not catch a key of another contract."""
    keys = re.findall(r"^\| \[.*?\| `([\w.]+)`(?:, with `\w+=\w+`)? \|", PAGE.read_text(), re.M)
    assert len(keys) == 10 and all(is_key(key) for key in keys)


@pytest.mark.parametrize("file", ["Reward function"], indirect=True)
def test_reward_function(file):
    outcome = RewardSource(file, "compute_score").load()(Sample("math", " 42", "42", {}))
    assert (outcome.score, outcome.extras) == (1.0, {"pred": "42"})


@pytest.mark.parametrize("file", ["Group reward function"], indirect=True)
def test_group_reward_function(file):
    """Its table has every entry of a row, and its code scores such rows."""
    facts = GroupFacts(7, 0, 2, False, 0.5)
    rows = [row_of(Sample("math", text, "42", {}), facts) for text in ("42", "42", "41")]
    outcomes = GroupRewardSource(RewardSource(file, "compute_group_scores")).load()(Group(rows))
    assert [(outcome.score, outcome.extras["acc"]) for outcome in outcomes] == [(0.5, 1.0), (0.5, 1.0), (0.0, 0.0)]
    table = re.findall(r"^\| (`.*?) \|", section("Group reward function"), re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(table))) == rows[0].keys()


@pytest.mark.parametrize("file", ["Verdict on a group"], indirect=True)
def test_verdict(file):
    judge = VerdictSource(file, "keep_group", "prints.txt").load()
    assert [judge([{"acc": acc} for acc in accs]).is_kept for accs in ((0, 1), (1, 1), (0, 0))] == [True, False, False]


@pytest.mark.parametrize("file", ["Environment"], indirect=True)
def test_environment(file):
    environment = load_class(file, "key", "Environment", ("reset", "step"))(most=3)
    environment.reset({"data_source": "d", "ground_truth": "7", "extra_info": {}, "index": 0, "sample": 0})
    read = observation_of(environment.step(Turn("6")), TextLimit(100))
    assert read == Observation(({"role": "user", "content": "try again"},), 0.0, False)


@pytest.mark.parametrize("file", ["Tool"], indirect=True)
def test_tool(file):
    tools = load_tools(file, "key")
    arguments = schemas_of(tools, "key")[0]["function"]["parameters"]["properties"]
    assert tools["add"](2, 3) == "5" and arguments["a"] == {"type": "integer", "description": "the first"}


@pytest.mark.parametrize("file", ["Agent"], indirect=True)
def test_agent(file):
    """Would not catch an endpoint without these attributes: tests/agents has agents that ask."""
    assert load_function(file, "key", "run", ("task", "endpoint"), may_be_async=True)


@pytest.mark.parametrize("file", ["Advantage estimator"], indirect=True)
def test_estimator(file):
    """Scores 1, 0, 0 of one prompt, of one, two and no tokens."""
    estimate = load_function(file, "key", "signs", ("samples", "config"))
    rewards, scores = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 0.0])
    samples = Samples(rewards, torch.tensor([1, 2, 0]), torch.tensor([4, 4, 4]), scores)
    advantages, returns = estimate(samples, AlgorithmConfig())
    assert advantages.tolist() == returns.tolist() == [1.0, -1.0, -1.0]


@pytest.mark.parametrize("file", ["Policy loss"], indirect=True)
def test_policy_loss(file):
    """At the old policy PPO's loss is -A."""
    loss = load_function(file, "key", "halved", ("tokens", "config"))
    zeros, clip = torch.zeros(2), ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.2)
    terms = loss(PolicyTokens(zeros, zeros, torch.tensor([2.0, -4.0]), torch.tensor([2])), clip)
    assert terms.loss.tolist() == [-1.0, 2.0]


@pytest.mark.parametrize("file", ["Scorer"], indirect=True)
def test_scorer(file):
    """By the methods that a run asks for. Would not catch columns that do not fit: tests/e2e has a run with one."""
    assert load_class(file, "key", "Shorter", ("start", "take")).in_validation is False


@pytest.mark.parametrize("file", ["Prompt sampler"], indirect=True)
def test_prompt_sampler(file):
    kind = load_class(file, "key", "PromptSampler", METHODS)
    sampler = kind([{"index": index} for index in range(3)], 2, 1, further=0)
    assert [sampler.next_indices(), sampler.next_indices()] == [[0, 1], [2, 0]]
    sampler.load_state_dict({"next": 1})
    assert sampler.next_indices() == [1, 2]
