"""A configuration as each stage sees it: its roles, its steps, and which values it refuses."""

from __future__ import annotations

import pytest

from megatron_rl.config.as_stage import as_stage
from megatron_rl.config.load import load_config, read_run
from megatron_rl.config.roles import Placement, trained_roles
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.steps import with_steps
from megatron_rl.config.validate import data_problems


@pytest.fixture
def config(tmp_path):
    def config(*overrides: str) -> RunConfig:
        file = tmp_path / "run.yaml"
        file.write_text("data: {train_files: a, val_files: b}\nactor_rollout_ref: {model: {path: m}}\n")
        return load_config(file, overrides)

    return config


@pytest.mark.parametrize(
    ("stage", "overrides", "missing"),
    [
        ("reward", ("critic.model.path=c",), False),
        (None, ("critic.model.path=c", "trainer.stage=reward"), False),
        ("reward", (), True),
        ("reward", ("critic.model.path=${actor_rollout_ref.model.path}",), True),
        ("dpo", ("critic.model.path=c",), True),
        (None, ("critic.model.path=c",), True),
    ],
)
def test_a_reward_model_is_the_one_model_that_is_named(tmp_path, stage, overrides: tuple, missing: bool) -> None:
    """Under its own keys. Would not catch a rule that reads the actor's model in that stage."""
    file = tmp_path / "run.yaml"
    file.write_text("data: {train_files: a, val_files: b}\n")
    reading = read_run(file, overrides, stage)
    assert [list(one.settings) for one in reading.violations] == [["actor_rollout_ref.model.path"]] * missing
    if not missing:
        assert trained_roles(as_stage(reading.config, "reward")) == {"critic": "c"}
        assert reading.config.actor_rollout_ref.model.path == "c"


@pytest.mark.parametrize(
    ("stage", "overrides", "names", "trained"),
    [
        ("sft", (), ["actor"], {"actor": "m"}),
        ("reward", ("critic.model.path=c",), ["critic"], {"critic": "c"}),
        ("dpo", (), ["actor"], {"actor": "m"}),
        ("dpo", ("dpo.reference=on_the_fly",), ["actor", "reference"], {"actor": "m"}),
        ("dpo", ("dpo.reference=on_the_fly", "dpo.loss=simpo"), ["actor"], {"actor": "m"}),
        ("ppo", (), ["actor", "critic", "rollout"], {"actor": "m", "critic": "m"}),
    ],
)
def test_roles_of_a_stage(config, stage: str, overrides: tuple[str, ...], names: list[str], trained: dict) -> None:
    """Would not catch a role of the right name and the wrong kind, which the runs do."""
    found = as_stage(config(*overrides), stage)
    assert list(Placement.of(found).roles) == names and trained_roles(found) == trained
    assert Placement.of(found).generates == (stage == "ppo")


def test_a_step_is_one_update_of_every_example_once(config) -> None:
    """Without a number of steps there is one epoch; PPO keeps what it has. Would not catch a cursor that skips rows."""
    given = config("data.train_batch_size=8", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_epochs=3")
    found = as_stage(given, "sft")
    actor = found.actor_rollout_ref.actor
    assert (actor.ppo_mini_batch_size, actor.ppo_epochs, found.actor_rollout_ref.rollout.n) == (8, 1, 1)
    assert with_steps(found, 20).trainer.num_steps == 2
    assert (
        with_steps(as_stage(config("trainer.total_epochs=3", "data.train_batch_size=8"), "dpo"), 20).trainer.num_steps
        == 6
    )
    assert given.actor_rollout_ref.actor.ppo_epochs == as_stage(given, "ppo").actor_rollout_ref.actor.ppo_epochs == 3


def test_the_longest_row_is_prompt_and_answer_unless_told(config) -> None:
    """And becoming a stage twice changes nothing. Would not catch a reader that ignores it."""
    found = as_stage(config("data.max_prompt_length=10", "data.max_response_length=6"), "sft")
    assert found.data.max_length == 16 and found.data.max_prompt_length + found.data.max_response_length == 16
    assert as_stage(found, "sft") == found
    assert as_stage(config("data.max_length=64"), "reward").data.max_response_length == 63


@pytest.mark.parametrize(
    ("stage", "truncation", "fits"), [("sft", "drop", True), ("sft", "middle", False), ("ppo", "drop", False)]
)
def test_truncation_belongs_to_a_stage(config, stage: str, truncation: str, fits: bool) -> None:
    """Would not catch other keys that a stage ignores."""
    problems = list(data_problems(as_stage(config(f"data.truncation={truncation}"), stage)))
    assert [list(problem.settings) for problem in problems] == ([] if fits else [["data.truncation"]])
