"""A configuration as each task sees it: its roles, its steps, and which values it refuses."""

from __future__ import annotations

import pytest

from megatron_rl.config.keys import ACTOR, ROLLOUT
from megatron_rl.config.load import load_config, read_run
from megatron_rl.config.roles import Placement, pool_sizes, roles_of, trained_roles
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.single_values import constraint_problems, magnitude_problems
from megatron_rl.config.steps import with_steps
from megatron_rl.config.task_config import IGNORED_KEYS, for_task
from megatron_rl.config.validate import data_problems, value_problems


@pytest.fixture
def config(tmp_path):
    def config(*overrides: str) -> RunConfig:
        file = tmp_path / "run.yaml"
        file.write_text("data: {train_files: a, val_files: b}\nactor_rollout_ref: {model: {path: m}}\n")
        return load_config(file, overrides)

    return config


@pytest.mark.parametrize(
    ("task", "overrides", "missing"),
    [
        ("reward", ("critic.model.path=c",), False),
        (None, ("critic.model.path=c", "trainer.stage=reward"), False),
        ("reward", (), True),
        ("reward", ("critic.model.path=${actor_rollout_ref.model.path}",), True),
        ("dpo", ("critic.model.path=c",), True),
        (None, ("critic.model.path=c",), True),
    ],
)
def test_a_reward_model_is_the_one_model_that_is_named(tmp_path, task, overrides: tuple, missing: bool) -> None:
    """Under its own keys. Would not catch a rule that reads the actor's model in that task."""
    file = tmp_path / "run.yaml"
    file.write_text("data: {train_files: a, val_files: b}\n")
    reading = read_run(file, overrides, task)
    assert [list(one.settings) for one in reading.violations] == [["actor_rollout_ref.model.path"]] * missing
    if not missing:
        assert trained_roles(for_task(reading.config, "reward")) == {"critic": "c"}
        assert reading.config.actor_rollout_ref.model.path == "c"


@pytest.mark.parametrize(
    ("task", "overrides", "names", "trained"),
    [
        ("sft", (), ["actor"], {"actor": "m"}),
        ("reward", ("critic.model.path=c",), ["critic"], {"critic": "c"}),
        ("dpo", (), ["actor"], {"actor": "m"}),
        ("dpo", ("dpo.reference=on_the_fly",), ["actor", "reference"], {"actor": "m"}),
        ("dpo", ("dpo.reference=on_the_fly", "dpo.loss=simpo"), ["actor"], {"actor": "m"}),
        ("ppo", (), ["actor", "critic", "rollout"], {"actor": "m", "critic": "m"}),
    ],
)
def test_roles_of_a_task(config, task: str, overrides: tuple[str, ...], names: list[str], trained: dict) -> None:
    """Would not catch a role of the right name and the wrong kind, which the runs do."""
    found = for_task(config(*overrides), task)
    assert list(Placement.of(found).roles) == names and trained_roles(found) == trained
    assert Placement.of(found).generates == (task == "ppo")


def test_a_step_is_one_update_of_every_example_once(config) -> None:
    """Without a number of steps there is one epoch; PPO keeps what it has. Would not catch a cursor that skips rows."""
    given = config("data.train_batch_size=8", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_epochs=3")
    found = for_task(given, "sft")
    actor, sizes = found.actor_rollout_ref.actor, found.batch_sizes
    assert (sizes.num_samples, sizes.mini_batch_samples(actor), sizes.num_optimizer_steps(actor)) == (8, 8, 1)
    assert with_steps(found, 20).trainer.num_steps == 2
    assert (
        with_steps(for_task(config("trainer.total_epochs=3", "data.train_batch_size=8"), "dpo"), 20).trainer.num_steps
        == 6
    )
    ppo = for_task(given, "ppo").batch_sizes
    assert (ppo.num_samples, ppo.mini_batch_samples(actor), ppo.num_optimizer_steps(actor)) == (32, 32, 3)


def test_the_longest_row_is_prompt_and_answer_unless_told(config) -> None:
    """And becoming a task twice changes nothing. Would not catch a reader that ignores it."""
    found = for_task(config("data.max_prompt_length=10", "data.max_response_length=6"), "sft")
    assert found.data.max_length == found.longest_sequence == 16
    assert for_task(found, "sft") == found
    assert for_task(config("data.max_length=64"), "reward").longest_response == 63


@pytest.mark.parametrize("task", ["sft", "reward", "dpo"])
def test_keys_of_ppo_do_not_matter(config, task: str) -> None:
    """A file of PPO serves a task: values that PPO may refuse, in every ignored key, are not reported, and change no
    role, batch or length. Would not catch a key that a task reads from elsewhere than its properties."""
    updates = ("ppo_mini_batch_size=0", "ppo_epochs=0", "shuffle=true")
    overrides = [f"{group}.{setting}" for group in (ACTOR, "critic") for setting in updates]
    overrides += ["data.gen_batch_size=0", f"{ACTOR}.megatron.param_offload=true", f"{ACTOR}.router_replay.mode=R9"]
    overrides += [
        f"{ACTOR}.mtp_loss_scaling_factor=-1",
        "data.ground_truth_key=answer",
        "data.default_data_source=nowhere",
    ]
    overrides += [f"{ROLLOUT}.n=0", f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.disable_custom_all_reduce=false"]
    overrides += [f"{ROLLOUT}.async_scheduling=true"]
    overrides += ["actor_rollout_ref.hybrid_engine=false", "algorithm.filter_groups.enable=true"]
    overrides += ["reward_model.enable=true", "reward_model.enable_resource_pool=true", "reward_models.a.weight=0"]
    overrides += [
        "ptx.coef=-1",
        "ptx.files=3",
        "ptx.mini_batch_size=1",
        "trainer.rollout_ahead=-1",
        "trainer.critic_warmup=-1",
        "trainer.recorded_prompts=-5",
        "trainer.rollouts_from=nowhere",
    ]
    overrides += ["async_training.partial_rollout=true", "data.max_length=40", "data.max_prompt_length=0"]
    plain, found = (for_task(config(*given), task) for given in (["data.max_length=40"], overrides))
    assert {override.partition("=")[0] for override in overrides} >= IGNORED_KEYS - {"data.max_response_length"}
    assert list(constraint_problems(found)) == list(magnitude_problems(found)) == list(value_problems(found)) == []
    assert [role.name for role in roles_of(found)] == [role.name for role in roles_of(plain)]
    assert pool_sizes(found) == pool_sizes(plain) and found.batch_sizes == plain.batch_sizes
    assert (found.longest_sequence, found.temperature, found.samples_ahead) == (40, 1.0, False)
    assert not any(role.mixed for role in roles_of(found))


@pytest.mark.parametrize(
    ("task", "truncation", "fits"), [("sft", "drop", True), ("sft", "middle", False), ("ppo", "drop", False)]
)
def test_truncation_belongs_to_a_task(config, task: str, truncation: str, fits: bool) -> None:
    """Would not catch other keys that a task ignores."""
    problems = list(data_problems(for_task(config(f"data.truncation={truncation}"), task)))
    assert [list(problem.settings) for problem in problems] == ([] if fits else [["data.truncation"]])
