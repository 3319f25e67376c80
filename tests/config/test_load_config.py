"""From YAML and overrides to a RunConfig, and what a user is told when they are wrong."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path

import pytest

from megatron_rl.config.keys import KEYS
from megatron_rl.config.load import load_config
from megatron_rl.config.problems import MOST_COMPARED, like_name, nearest_name
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError

DEMO = Path(__file__).parents[2] / "configs" / "demo_cpu.yaml"
MANDATORY = """
data: {train_files: a.parquet, val_files: b.parquet}
actor_rollout_ref: {model: {path: model}}
custom_reward_function: {path: reward.py}
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return file

    return write


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    return str(error.value)


def test_file_overrides_and_defaults_meet(write):
    """Later wins: default, file, overrides in order. Would not catch a default that is a bad choice."""
    file = write(MANDATORY + "trainer: {seed: 3, nnodes: 2}\n")
    config = load_config(file, ["trainer.seed=4", "trainer.seed=5", "actor_rollout_ref.actor.optim.lr=3e-4"])
    assert (config.trainer.seed, config.trainer.nnodes, config.trainer.n_gpus_per_node) == (5, 2, 8)
    assert config.actor_rollout_ref.actor.optim.lr == 3e-4


def test_followers_follow_until_set(write):
    """Interpolated keys take the final value of what they follow. Would not catch one that follows the wrong key."""
    megatron = "actor_rollout_ref.actor.megatron"
    config = load_config(write(MANDATORY), [f"{megatron}.tensor_model_parallel_size=4", f"{megatron}.dtype=bfloat16"])
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 4
    assert config.critic.megatron.tensor_model_parallel_size == 4
    assert (config.critic.megatron.dtype, config.critic.model.path) == ("bfloat16", "model")
    config = load_config(write(MANDATORY), ["trainer.seed=7", "data.seed=9"])
    assert (config.trainer.seed, config.data.seed) == (7, 9)


def test_result_is_plain_dataclasses(write):
    """Would not catch a value of a wrong type that the schema itself allows."""
    config = load_config(write(MANDATORY), ["trainer.logger=[jsonl]", "actor_rollout_ref.actor.optim.betas=[0.8,0.9]"])
    assert isinstance(config, RunConfig) and type(config.trainer.logger) is list
    assert (config.trainer.logger, config.actor_rollout_ref.actor.optim.betas) == (["jsonl"], (0.8, 0.9))
    assert "${" not in str(dataclasses.asdict(config))


def test_all_unknown_keys_are_named_with_origin_and_neighbour(write):
    """Nested, from file and overrides. Would not catch a suggestion that is near but not what was meant."""
    file = write(MANDATORY + "trainer: {sed: 1}\ncritic: {optm: {lrr: 1}}\n")
    text = refusal(file, "rollout.n=8", "data.train_batchsize=4")
    assert f"unknown key trainer.sed ({file}); did you mean: trainer.seed=1" in text
    assert f"unknown key critic.optm.lrr ({file}); did you mean: critic.optim.lr=1" in text
    assert "unknown key rollout.n (override); did you mean: actor_rollout_ref.rollout.n=8" in text
    assert "unknown key data.train_batchsize (override); did you mean: data.train_batch_size=4" in text
    assert "4 problems" in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train_batch_size=abc", "data.train_batch_size='abc' (override) must be of type int"),
        ("data.train_batch_size=1.5", "data.train_batch_size=1.5 (override) must be of type int"),
        ("actor_rollout_ref.rollout.n=0.4", "to Integer; try: actor_rollout_ref.rollout.n=1"),
        ("data.train_batch_size=7.6", "could not be converted to Integer; try: data.train_batch_size=8"),
        ("data.train_batch_size=.inf", "could not be converted to Integer; try: data.train_batch_size=64"),
        ("data.gen_batch_size=1e400", "could not be converted to Integer; try: data.gen_batch_size="),
        ("trainer.total_epochs=.nan", "could not be converted to Integer; try: trainer.total_epochs=null"),
        ("critic.optim.lr=high", "could not be converted to Float; try: critic.optim.lr=1e-05"),
        ("data.train_batch_size=null", "data.train_batch_size=None (override) must be of type int"),
        ("data.shuffle=maybe", "data.shuffle='maybe' (override) must be of type bool"),
        ("trainer.logger={a: b}", "must be of type list[str]"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "must be of type tuple[float, float]"),
        ("data=3", "data is a group of keys, not a value"),
        ("trainer.seed", "override 'trainer.seed' has no '='"),
        ("trainer.logger=[a", "cannot be parsed"),
        ("trainer.seed=${trainer.nope}", "trainer.nope"),
        ("trainer.seed=${trainer.device}", "could not be converted to Integer"),
    ],
)
def test_wrong_values_are_refused(write, override, expected):
    """Would not catch a value of the right type that makes no sense; preflight does."""
    assert expected in refusal(write(MANDATORY), override)


def test_open_groups_take_names_of_the_users_own(write):
    """From file and overrides, any type, later wins. Would not catch a name that the template does not know."""
    file = write(
        MANDATORY.replace("val_files", "apply_chat_template_kwargs: {enable_thinking: false, a: 1}, val_files")
    )
    config = load_config(file, ["data.apply_chat_template_kwargs.a=2", "custom_reward_function.reward_kwargs.b.c=[x]"])
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False, "a": 2}
    assert config.custom_reward_function.reward_kwargs == {"b": {"c": ["x"]}}
    assert "must be of type" in refusal(file, "data.apply_chat_template_kwargs=3")


def test_files_may_be_one_or_several(write):
    """Would not catch a path with a comma in a list."""
    config = load_config(write(MANDATORY), ["data.train_files=[a.parquet,b.jsonl]", "data.train_file_weights=[1,0.5]"])
    assert (config.data.train_files, config.data.val_files) == (["a.parquet", "b.jsonl"], "b.parquet")
    assert config.data.train_file_weights == [1.0, 0.5]


def test_a_tilde_is_the_users_home(write, monkeypatch):
    """In every key that names files, from the file and from overrides, and in no other key. Would not catch ${HOME}."""
    monkeypatch.setenv("HOME", "/home/me")
    given = ("trainer.default_local_dir=~/run", "data.train_files=[~/a.parquet,b~.parquet]", "trainer.project_name=~/x")
    config = load_config(write(MANDATORY.replace("path: model", "path: ~/model")), given)
    assert config.trainer.default_local_dir == "/home/me/run" and config.trainer.project_name == "~/x"
    assert config.data.train_files == ["/home/me/a.parquet", "b~.parquet"]
    assert config.actor_rollout_ref.model.path == config.critic.model.path == "/home/me/model"


def test_all_mandatory_keys_are_listed_at_once(write):
    """Would not catch a key that ought to be mandatory and has a default."""
    text = refusal(write("data: {val_files: b.parquet}\ntrainer:\n"))
    assert "data.train_files, actor_rollout_ref.model.path;" in text
    assert "data.val_files," not in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data:\n  a: 1\n b: 2\n", "line 3"),
        ("data: {seed: 1}\ndata: {seed: 2}\n", "duplicate key data"),
        ("- a\n", "holds a list"),
        ("trainer: {seed: '${'}\n", "not valid YAML"),
        (f"trainer: {{seed: {'[' * 100_000}", "not valid YAML: it is nested more than 50 levels deep"),
        (f"trainer: {{seed: {'[' * 50}{']' * 50}}}\n", "not valid YAML: it is nested more than 50 levels deep"),
        ("\n".join(" " * level + "- " for level in range(60)), "not valid YAML: it is nested more than 50"),
        (f"trainer: {{seed: {'[' * 48}{']' * 48}}}\n", "must be of type int"),
        (f"trainer: {{seed: {'9' * 5000}}}\n", "not valid YAML: Exceeds the limit"),
    ],
)
def test_broken_files_are_refused(write, text, expected):
    """Would not catch a file that parses to something else than its author meant."""
    assert expected in refusal(write(text))


def test_brackets_in_quotes_are_a_name(write):
    """Where no list can be read from them. Would not catch a rule for the names of files."""
    override = f"data.val_files='{'[' * 100_000}'"
    assert load_config(write(MANDATORY), [override]).data.val_files == "[" * 100_000


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"trainer.seed={'9' * 5000}", "cannot be parsed: Exceeds the limit"),
        (f"actor_rollout_ref.actor.optim.lr={'9' * 400}", "must be of type float: int too large"),
        (f"trainer.nnodes={'9' * 400}", "must be of type int: it has more than 63 bits; try: trainer.nnodes=1"),
        (f"data.val_files={'[' * 100_000}", "cannot be parsed: it is nested more than 50 levels deep"),
        ("data.val_files=caf\udce9.parquet", "cannot be parsed: 'utf-8' codec can't encode"),
    ],
)
def test_values_that_python_cannot_hold(write, override, expected):
    """Numbers without end, and a byte of the command line that is no UTF-8. Would not catch absurd ones."""
    text = refusal(write(MANDATORY), override)
    assert expected in text and text.encode()


def test_missing_file_names_its_neighbour():
    """Would not catch a right name in the wrong folder."""
    assert f"did you mean: {DEMO}" in refusal(DEMO.with_name("demo_cpus.yaml"))


def test_demo_config_is_the_documented_demo():
    """The committed file loads and says what the README says. Would not catch values that train badly."""
    config = load_config(DEMO)
    shared = config.actor_rollout_ref
    assert (shared.rollout.n, config.data.train_batch_size, shared.actor.ppo_mini_batch_size) == (8, 64, 32)
    assert (shared.actor.optim.lr, config.critic.optim.lr) == (1e-4, 1e-3)
    megatron = config.critic.megatron
    assert (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size) == (2, 2)
    assert shared.rollout.kv_cache_memory_bytes == 64 * 2**20


def test_nearest_name_weighs_the_last_part():
    """Would not catch a tie broken the other way."""
    assert nearest_name("actor.lr", KEYS) == "actor_rollout_ref.actor.optim.lr"
    assert nearest_name("trainer.n_gpu", KEYS) == "trainer.n_gpus_per_node"


@pytest.mark.parametrize(
    ("find", "most"),
    [
        (lambda: [like_name(f"trainer.unknown_key_{number}", KEYS) for number in range(100)], 100 * 100),
        (lambda: like_name("trainer." + "seed_" * 10**5, KEYS), 0),
        (lambda: nearest_name("run_71.yaml", [f"run_{number}.yml" for number in range(10**5)]), 2 * MOST_COMPARED),
        (lambda: nearest_name("x" * 10**6, ["y" * 10**6]), 2),
    ],
    ids=["unknown keys", "a long key", "a large folder", "long names"],
)
def test_names_of_users_are_compared_within_bounds(monkeypatch, find, most):
    """At most so many pairs, each of at most 200 letters: all pairs of 100 keys would be 250,000.

    Would not catch a comparison elsewhere than in `problems.py`.
    """
    compared = []

    class Counted(difflib.SequenceMatcher):
        def ratio(self):
            compared.append(max(len(self.a), len(self.b)))
            return super().ratio()

    monkeypatch.setattr(difflib, "SequenceMatcher", Counted)
    find()
    assert len(compared) <= most and max(compared, default=0) <= 200


def test_the_nearest_of_many_names_is_the_nearest_of_all():
    """As like as any of 2,000, with a slip at the start, middle or end. Would not catch one with slips at both ends."""
    names = [f"{number:04d}_part_{number % 7}" for number in range(2000)]
    for slip in ("234_part_2", "1234_prt_2", "1234_part_"):
        likeness = {name: difflib.SequenceMatcher(None, slip, name).ratio() for name in names}
        assert likeness[nearest_name(slip, names)] == max(likeness.values())
