"""What preflight says of normalised scores and of functions of groups. No model is read, and no code is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.checkpoint.score_statistics import ScoreStatistics, write_statistics
from megatron_rl.config.judge_rules import judge_problems
from megatron_rl.config.load import read_config
from megatron_rl.config.validate import reward_problems
from megatron_rl.planning.checked_config import idle_keys
from megatron_rl.planning.file_rules import filter_problems, reward_function_problems, statistics_problems
from megatron_rl.planning.pool_rules import pool_problems
from megatron_rl.scoring.rewards import reward_shaping

DEMO = Path(__file__).parents[2] / "configs" / "demo_cpu.yaml"


@pytest.mark.parametrize("group", ["reward_model", "reward_models.strict"])
def test_statistics_must_be_there(tmp_path: Path, group: str):
    """Asked for and there, asked for and not there, and not asked for. Would not catch statistics of other scores."""
    keys = [f"{group}.model.path={tmp_path}", "reward_model.enable=true", "reward_model.model.path=nowhere"]
    config, _ = read_config(DEMO, [*reversed(keys), f"{group}.normalize_reward=held_out"])
    (tmp_path / "config.json").write_text("{}")
    (problem,) = statistics_problems(config)
    assert str(problem) == (
        f"{group}.normalize_reward=held_out needs the mean and spread of held-out scores in {group}.model.path="
        f"{tmp_path}: it has no reward_statistics.json, and its config.json no mean and std; try: running; "
        "megatron-rl reward writes them into the folder of the model that it exports"
    )
    write_statistics(tmp_path, ScoreStatistics(1.0, 2.0))
    assert list(statistics_problems(config)) == []
    config, _ = read_config(DEMO, [*reversed(keys), f"{group}.normalize_reward=running"])
    assert list(statistics_problems(config)) == []


JUDGE = ("reward_model.enable=true", "reward_model.model.path=self", 'reward_model.judge.prompt="{response}?"')
COMPARES = ("reward_model.judge.form=group", 'reward_model.judge.prompt="{responses}?"')
SHORT = ("reward_model.judge.max_prompt_length=8", "reward_model.judge.max_response_length=4")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (SHORT, ""),
        ((*SHORT, "reward_model.normalize_reward=running", "reward_model.reward_clip_range=[-1,1]"), ""),
        ((*SHORT, "reward_model.normalize_reward=held_out"), "it is a judge; try: running"),
        ((*SHORT, "reward_model.judge.verdicts={good: yes}"), "must be words with scores that are finite"),
        ((*SHORT, "reward_model.judge.scale=[1,1]"), "must be [lowest, highest]"),
        ((*SHORT, "reward_model.judge.form=rubric"), "must have {criterion}"),
        ((*SHORT, *COMPARES, "actor_rollout_ref.rollout.n=1"), "rollout.n=1 must be at least 2"),
        ((), "as reward_model.model.path=self"),
    ],
)
def test_keys_of_a_judge(keys: tuple[str, ...], problem: str):
    """Of the policy as its own judge, whose scores are shaped as those of other models are. Would not catch a template
    that the judge's tokenizer refuses.
    """
    config, _ = read_config(DEMO, [*JUDGE, *keys])
    said = [str(one) for one in judge_problems(config)]
    assert [problem in one for one in said] == ([True] if problem else []), said
    shape = reward_shaping(config).shapes.get("reward_model") if not problem else None
    assert (shape is not None) == ("reward_model.normalize_reward=running" in keys)
    assert idle_keys(config, ["reward_model.model.path"]) == []
    key = "reward_model.megatron.param_offload"
    assert idle_keys(config, [key]) == [f"without effect: {key}, because this run has no judge with ranks"]


REPLICAS = ("actor_rollout_ref.rollout.pool=gen", "pools.gen.n_gpus_per_node=1", "trainer.rollout_ahead=1")


@pytest.mark.parametrize("keys", [(), REPLICAS, ("trainer.rollout_ahead=1",)], ids=["here", "replicas", "colocated"])
def test_a_policy_on_replicas_gives_no_verdicts_for_dynamic_sampling(keys: tuple[str, ...]):
    """They would wait for each other for ever. Would not catch a schedule that waits elsewhere."""
    config, wrong = read_config(DEMO, [*JUDGE, *SHORT, *keys, "algorithm.filter_groups.enable=true"])
    said = [str(one) for one in pool_problems(config) if "for dynamic sampling" in str(one)]
    assert not wrong and len(said) == (keys == REPLICAS), said


OF_GROUPS, NAME = "custom_reward_function.per_group", "custom_reward_function.name"
RESPONSES = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ..."


@pytest.mark.parametrize(
    ("text", "name", "per_group", "problem", "nearest"),
    [
        ("def compute_group_scores(rows): ...", "compute_score", False, "must be a function of", {OF_GROUPS: True}),
        ("def compute_score(rows): ...", "compute_score", False, "must take the keywords", {OF_GROUPS: True}),
        (
            RESPONSES,
            "compute_score",
            True,
            "be callable as compute_score(rows); compute_score(data",
            {OF_GROUPS: False},
        ),
        ("def rank(rows, judge): ...", "rank", True, "callable as rank(rows); rank(rows, judge) is not", {}),
        ("def rank(): ...", "rank", True, "callable as rank(rows); rank() is not", {}),
        ("async def rank(group, *, judge=1): ...", "rank", True, None, {}),
        ("def rank(*groups): ...", "rank", True, None, {}),
    ],
)
def test_functions_of_groups(tmp_path: Path, text: str, name: str, per_group: bool, problem: str | None, nearest: dict):
    """By their parameters. Would not catch a function that is made when the file is run."""
    (tmp_path / "mine.py").write_text(text + "\n")
    config, _ = read_config(DEMO, [])
    custom = config.custom_reward_function
    custom.path, custom.name, custom.per_group = str(tmp_path / "mine.py"), name, per_group
    found = list(reward_function_problems(custom))
    assert [problem in one.rule for one in found] == ([] if problem is None else [True])
    assert all(one.nearest.items() >= nearest.items() and bool(one.nearest) == bool(nearest) for one in found)


def test_built_in_functions_score_responses():
    """Would not catch a built-in one that compares."""
    config, _ = read_config(DEMO, ["custom_reward_function.path=null", f"{OF_GROUPS}=true"])
    (problem,) = reward_problems(config)
    assert str(problem).startswith(f"{OF_GROUPS}=true needs custom_reward_function.path") and "try: false" in str(
        problem
    )


def test_the_verdict_on_groups(tmp_path: Path):
    """A name that the file does not have, and a filter that is off. Would not catch what the function returns."""
    (tmp_path / "mine.py").write_text("def keeps_group(rows): ...\n")
    key = "algorithm.filter_groups"
    keys = read_config(DEMO, [f"{key}.path={tmp_path / 'mine.py'}"])[0].algorithm.filter_groups
    name, off = filter_problems(keys)
    assert name.nearest == {f"{key}.name": "keeps_group"} and off.nearest == {f"{key}.enable": True}
    keys.enable, keys.name = True, "keeps_group"
    assert list(filter_problems(keys)) == []
