"""Rules of single values: constraints on the schema's fields, and absurd sizes."""

from __future__ import annotations

import ast
import copy
import math
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, get_type_hints

import pytest
from annotated_types import Gt, Le

from megatron_rl.config import single_values
from megatron_rl.config.constraints import Bounds, Constraints, OneOf, constraints_of
from megatron_rl.config.keys import KEYS, LEAVES
from megatron_rl.config.load import load_config
from megatron_rl.config.megatron import LAYOUT_KEYS
from megatron_rl.config.single_values import magnitude_problems
from megatron_rl.config.validate import value_problems as violations
from megatron_rl.errors import shown

MUON = "critic.optim.override_optimizer_config."
MANDATORY = [
    "data.train_files=a",
    "data.val_files=b",
    "actor_rollout_ref.model.path=m",
    "custom_reward_function.path=r",
]


def value_problems(config) -> list[str]:
    return [str(violation) for violation in violations(config)]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "empty.yaml"
    file.write_text("{}\n")
    return lambda *overrides: load_config(file, [*MANDATORY, *overrides])


@pytest.fixture(scope="module")
def defaults(config):
    return config()


def changed(defaults, key, value):
    """The defaults but for one key, which is set without reading a file: that takes most of a test's time."""
    found = copy.deepcopy(defaults)
    *groups, name = key.split(".")
    setattr(attrgetter(".".join(groups))(found), name, value)
    return found


def test_defaults_keep_every_rule(config):
    """Would not catch a rule that is too lax."""
    assert value_problems(config()) == []


CHOICES = {key: leaf for key, leaf in LEAVES.items() if leaf.choices is not None}
RANGES = {key: leaf for key, leaf in LEAVES.items() if leaf.bounds is not None and leaf.bounds.low >= 0}


def test_constraints_are_declared():
    """Of names and of numbers, nullable and not. Would not catch a key that ought to have one and has not."""
    assert LEAVES["trainer.resume_mode"] == Constraints(str, choices=("auto", "disable", "resume_path"))
    assert LEAVES["algorithm.rollout_correction.rollout_is"].choices == ("token", "sequence")
    assert LEAVES["trainer.max_ckpt_to_keep"] == Constraints(int | None, bounds=Bounds(1))
    assert len(CHOICES) > 30 and len(RANGES) > 150 and KEYS["trainer.nnodes"] is int


@dataclass
class Group:
    learning_rate: Annotated[float, Gt(0), Le(1)] = 0.5
    kind: Annotated[str | None, OneOf(("left", "right"))] = None


def test_a_new_key_is_one_line():
    """The field is all: its constraint is read from there, and no other file lists keys with their limits.

    Would not catch a key whose sizes break something else.
    """
    hints = get_type_hints(Group, include_extras=True)
    rate, kind = constraints_of(hints["learning_rate"]), constraints_of(hints["kind"])
    assert rate.holds(1.0) and not rate.holds(0.0) and kind.holds("left") and kind.kind == str | None
    problem = str(rate.violation("learning_rate", math.nan, Group.learning_rate, None))
    assert problem == "learning_rate=nan must be a finite number > 0 and <= 1; try: 0.5"
    assert str(kind.violation("kind", "lft", None, None)) == "kind=lft must be one of left, right; did you mean: left"
    for file in Path(single_values.__file__).parent.glob("*.py"):
        for table in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Dict)):
            listed = [key.value for key in table.keys if isinstance(key, ast.Constant) and key.value in LEAVES]
            assert len(listed) <= 3, (file, listed)


@pytest.mark.parametrize("key", CHOICES)
def test_each_choice_is_kept(defaults, key):
    """A name that is no choice is refused with all choices. Would not catch a choice that nothing implements."""
    is_list = isinstance(attrgetter(key)(defaults), list)
    given = changed(defaults, key, ["vlm"] if is_list else "vlm")
    if is_shared_layout(key):
        assert not any(problem.startswith(key) for problem in value_problems(given))
        return
    (problem,) = [found for found in value_problems(given) if found.startswith(f"{key}=")]
    choices = ", ".join(CHOICES[key].choices or ())
    shown, each = ("['vlm']", ", each") if is_list else ("vlm", "")
    assert problem.startswith(f"{key}={shown} must be one of {choices}{each}; did you mean: ")


@pytest.mark.parametrize("key", RANGES)
def test_each_range_is_kept_and_suggests_a_valid_value(defaults, key):
    """-2 is too small for every number we have. Would not catch a wrong upper end, nor a limit that is off by one."""
    found = [problem for problem in value_problems(changed(defaults, key, -2)) if problem.startswith(f"{key}=-2")]
    assert len(found) == (not is_shared_layout(key)), found
    for problem in found:
        suggestion = problem.rpartition("try: ")[2]
        if "_pipeline_stage" in key or "virtual_pipeline" in key:
            assert suggestion == "null"
        elif LEAVES[key].other is not None:
            assert suggestion == shown(LEAVES[key].other.value)
        else:
            assert RANGES[key].bounds.holds(float(suggestion))


def is_shared_layout(key: str) -> bool:
    """Layouts of reference and reward model, which must equal the actor's in its pool."""
    group, _, name = key.rpartition(".megatron.")
    return group in ("actor_rollout_ref.ref", "reward_model") and name in LAYOUT_KEYS


FLOATS = [key for key, kind in KEYS.items() if "float" in str(kind)]


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_may_be_infinite_or_nan(defaults, key, value):
    """Every key of the schema that holds a float, alone or in a list. Would not catch a number the user names."""
    given = (
        [value]
        if "weights" in key
        else [0.9, value]
        if "betas" in key or key.endswith(("clip_range", ".scale"))
        else value
    )
    assert any(problem.startswith(f"{key}=") for problem in value_problems(changed(defaults, key, given)))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.gamma=1.01", "algorithm.gamma=1.01 must be >= 0 and <= 1; try: 1"),
        ("trainer.seed=-1", "trainer.seed=-1 must be >= 0 and <= 4294967295; try: 0"),
        ("trainer.seed=4294967296", "must be >= 0 and <= 4294967295; try: 4294967295"),
        ("actor_rollout_ref.actor.entropy_coeff=.inf", "entropy_coeff=inf must be a finite number; try: 0"),
        ("trainer.n_gpus_per_node=1000000", "must be >= 1 and <= 100000; try: 100000"),
        ("actor_rollout_ref.rollout.temperature=0", "temperature=0 must be >= 0.01; try: 0.01"),
        ("actor_rollout_ref.rollout.temperature=1e-320", "temperature=9.99989e-321 must be >= 0.01; try: 0.01"),
        ("critic.optim.lr=1e400", "critic.optim.lr=inf must be a finite number >= 0; try: 1e-05"),
        ("algorithm.gamma=.inf", "algorithm.gamma=inf must be >= 0 and <= 1; try: 1"),
        ("algorithm.gamma=.nan", "algorithm.gamma=nan must be a finite number >= 0 and <= 1; try: 1"),
        ("actor_rollout_ref.actor.clip_ratio_c=.inf", "clip_ratio_c=inf must be a finite number > 1; try: 3"),
        ("actor_rollout_ref.actor.policy_loss.dro_beta=.inf", "dro_beta=inf must be a finite number > 0; try: 0.1"),
        ("actor_rollout_ref.rollout.top_p=0", "top_p=0 must be > 0 and <= 1; try: 1"),
        ("critic.megatron.num_layers_in_last_pipeline_stage=0", "_last_pipeline_stage=0 must be >= 1; try: null"),
        ("actor_rollout_ref.rollout.n=0", "actor_rollout_ref.rollout.n=0 must be >= 1; try: 1"),
        ("actor_rollout_ref.actor.clip_ratio_c=1", "clip_ratio_c=1 must be > 1; try: 3"),
        ("algorithm.rollout_correction.rollout_rs_threshold_lower=2", "must be >= 0 and <= 1; try: 1"),
        ("actor_rollout_ref.actor.policy_loss.dro_beta=0", "dro_beta=0 must be > 0; try: 0.1"),
        ("actor_rollout_ref.actor.policy_loss.top_entropy_quantile=20", "=20 must be >= 0 and <= 1; try: 1"),
        ("algorithm.gdpo_reward_weights=[1,.inf]", "gdpo_reward_weights=[1.0, inf] must be finite; try: null"),
        ("critic.optim.min_lr=1", "critic.optim.min_lr=1 must be <= lr=1e-05"),
        ("critic.optim.lr_decay_style=WSD", "critic.optim.lr_wsd_decay_steps=0 must, with lr_decay_style=WSD, be >= 1"),
        ("actor_rollout_ref.actor.optim.betas=[0.9,1.0]", "betas=[0.9, 1.0] must both be >= 0 and < 1"),
        ("critic.optim.optimizer=mouon", "critic.optim.optimizer=mouon must be one of adam, muon; did you mean: muon"),
        (f"{MUON}muon_num_ns_steps=0", "muon_num_ns_steps=0 must be >= 1"),
        (
            f"{MUON}muon_scale_mode=spectrum",
            "must be one of spectral, unit_rms_norm, shape_scaling; did you mean: spectral",
        ),
        (f"{MUON}muon_tp_mode=distributed", "muon_tp_mode=distributed must be one of duplicated, blockwise"),
        ("actor_rollout_ref.actor.optim.lr=.nan", "lr=nan must be a finite number >= 0; try: 1e-06"),
        ("reward_model.timeout_s=0", "reward_model.timeout_s=0 must be > 0; try: 10"),
        ("reward_model.failed_score=.nan", "reward_model.failed_score=nan must be a finite number; try: 0"),
        ("custom_reward_function.reward_kwargs.extra_info=1", "reward_kwargs.extra_info=1 is given by each row"),
        ("data.train_files=[]", "data.train_files=[] must be a path or a list of at least one path"),
        ("data.val_files=[a,3]", "data.val_files=['a', 3] must be a path or a list"),
        ("data.train_file_weights=[1,2]", "[1.0, 2.0] must be one number for each of data.train_files, of which there"),
        ("data.train_file_weights=[0]", "data.train_file_weights=[0.0] must be > 0 and finite; try: [1.0]"),
        (
            "actor_rollout_ref.rollout.val_kwargs.n=4",
            "val_kwargs.do_sample=false ask for one greedy response several times; try: actor",
        ),
        (
            "reward_model.enable=true",
            "reward_model.model.path=null must be a model folder, as reward_model.enable=true",
        ),
        ("reward_model.weight=.inf", "reward_model.weight=inf must be a finite number; try: 1"),
        (
            "reward_model.rule_weight=0",
            "reward_model.rule_weight=0 must not be 0, because nothing else gives a score; try: 1",
        ),
    ],
)
def test_limits_by_hand(config, override, expected):
    """Would not catch limits of keys that are not listed here."""
    (problem,) = value_problems(config(override))
    assert expected in problem


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("critic.ppo_epochs=1001",), "critic.ppo_epochs=1001 must be at most 1000; try: 1000"),
        (("data.gen_batch_size=1000000000000",), "gen_batch_size=1000000000000 must be at most 1000000; try: 10"),
        (("trainer.save_freq=1000000001",), "trainer.save_freq=1000000001 must be at most 1000000000; try: 10000"),
        (("reward_models.one.model.path=m", "reward_models.one.max_length=9000000000"), "reward_models.one.max_length"),
        (("actor_rollout_ref.actor.entropy_coeff=-1e16",), "must be at most 1e+15 in size; try: -1e+15"),
        (("critic.optim.eps=1e-320",), "must be at least 1e-30 in size, if it is not 0; try: 1e-30"),
        (("algorithm.gdpo_reward_weights=[1,1e30]",), "[1.0, 1e+30] must be at most 1e+15 in size; try: [1.0, 1"),
        (("reward_model.timeout_s=1e12",), "timeout_s=1e+12 must be at most 1e+09 in size; try: 1e+09"),
        (("algorithm.gamma=1e30",), None),  # its own range says so
        (("data.seed=5000000000", "trainer.seed=4294967295", "actor_rollout_ref.actor.clip_ratio_c=1e9"), None),
        (
            ("data.train_batch_size=300000", "actor_rollout_ref.rollout.n=40"),
            "data.train_batch_size=300000 and actor_rollout_ref.rollout.n=40 are 12000000 samples of a batch, and must "
            "be at most 10000000; try: data.train_batch_size=250000 actor_rollout_ref.rollout.n=40",
        ),
        (("data.train_batch_size=250000", "actor_rollout_ref.rollout.n=40"), None),
    ],
)
def test_no_number_is_absurd(config, overrides, expected):
    """By hand. Would not catch a size that lies in no list and takes long all the same."""
    problems = [str(violation) for violation in magnitude_problems(config(*overrides))]
    assert len(problems) == (expected is not None) and all(expected in problem for problem in problems)


def test_defaults_are_sensible(config):
    """With every key as it is. Would not catch a bound that is too low for a large run."""
    assert list(magnitude_problems(config())) == []


def test_all_problems_are_listed(config):
    """In the order of the schema. Would not catch an order that is hard to read."""
    problems = value_problems(config("trainer.nnodes=0", "trainer.device=tpu", "algorithm.lam=2"))
    assert [problem.partition("=")[0] for problem in problems] == ["algorithm.lam", "trainer.device", "trainer.nnodes"]


def test_built_in_rewards_are_chosen_by_name(config):
    """Only where no file is named. Would not catch a rule that nothing implements."""
    assert value_problems(config("custom_reward_function.path=null", "custom_reward_function.name=math")) == []
    assert value_problems(config("custom_reward_function.name=maths")) == []
    (problem,) = value_problems(config("custom_reward_function.path=null", "custom_reward_function.name=maths"))
    assert problem.endswith("must, without a path, be one of compute_score, exact_match, math; did you mean: math")


MODEL_ALONE = ("custom_reward_function.path=null", "custom_reward_function.name=null")
FURTHER = "reward_models.helpful.model.path=rm"
ZERO = ("reward_model.weight=0", "reward_models.helpful.weight=0")
VALIDATES = "custom_reward_function.validation_only=true"
WITH_MODEL = ("reward_model.enable=true", "reward_model.model.path=rm")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (WITH_MODEL, []),
        ((*WITH_MODEL, *MODEL_ALONE), []),
        ((*WITH_MODEL, "reward_model.rule_weight=0"), []),
        ((*WITH_MODEL, "reward_model.weight=0"), []),
        (("reward_model.model.path=rm",), []),
        (
            (*WITH_MODEL, "custom_reward_function.name=null"),
            ["custom_reward_function.path=r must be null, as custom_reward_function.name=null; try: null"],
        ),
        (
            (*WITH_MODEL, *MODEL_ALONE, "reward_model.weight=0"),
            ["reward_model.weight=0 must not be 0, because nothing else gives a score; try: 1"],
        ),
        ((*MODEL_ALONE, FURTHER), []),
        ((FURTHER, "reward_model.rule_weight=0"), []),
        (
            (*MODEL_ALONE, FURTHER, "reward_models.helpful.weight=0"),
            ["reward_models.helpful.weight=0 must not be 0, because nothing else gives a score; try: 1"],
        ),
        (
            (*WITH_MODEL, FURTHER, *ZERO, "reward_model.rule_weight=0"),
            ["reward_model.weight=0 must not be 0, because nothing else gives a score; try: 1"],
        ),
        (("reward_models.helpful.weight=2",), ["reward_models.helpful.model.path=null must be a model folder"]),
        (
            (*WITH_MODEL, "reward_model.normalize_reward=runing"),
            ["reward_model.normalize_reward=runing must be one of held_out, running; did you mean: running"],
        ),
        (
            (*WITH_MODEL, "reward_model.reward_clip_range=[5,-5]"),
            ["reward_model.reward_clip_range=[5.0, -5.0] must be [lowest, highest], both finite and the first below"],
        ),
        (
            (*WITH_MODEL, "reward_model.data_sources=[]"),
            ["reward_model.data_sources=[] must name at least one source of prompts, or be null; try: null"],
        ),
        ((FURTHER, "reward_models.helpful.data_sources=[]"), ["reward_models.helpful.data_sources=[] must name at"]),
        ((*WITH_MODEL, "reward_model.reward_clip_range=[5]"), ["reward_model.reward_clip_range=[5.0] must be"]),
        ((*WITH_MODEL, "reward_model.reward_clip_range=[0,9]", "reward_model.normalize_reward=held_out"), []),
        (
            (
                FURTHER,
                "reward_models.helpful.normalize_reward=true",
                "reward_models.helpful.reward_clip_range=[1,.nan]",
            ),
            [
                "reward_models.helpful.normalize_reward=",
                "reward_models.helpful.reward_clip_range=[1.0, nan] must be [lowest, highest]",
            ],
        ),
        ((FURTHER, "reward_models.helpful.weight=.nan"), ["reward_models.helpful.weight=nan must be a finite number"]),
        (
            (FURTHER, "reward_models.helpful.micro_batch_size_per_gpu=0"),
            ["reward_models.helpful.micro_batch_size_per_gpu=0 must be >= 1; try: 1"],
        ),
        (
            (FURTHER, "reward_models.helpful.max_length=9"),
            ["reward_models.helpful.max_length=9 is of no use without reward_models.helpful.model.input_tokenizer"],
        ),
        (
            (FURTHER, "reward_models.helpful.max_length=0", "reward_models.helpful.model.input_tokenizer=m"),
            ["reward_models.helpful.max_length=0 must be >= 1; try: 1"],
        ),
        (
            (*WITH_MODEL, "reward_model.max_length=0", "reward_model.model.input_tokenizer=m"),
            ["reward_model.max_length=0 must be >= 1; try: 1"],
        ),
        ((FURTHER, "reward_models.helpful.model.input_tokenizer=m", "reward_models.helpful.max_length=9"), []),
        ((*WITH_MODEL, VALIDATES), []),
        ((FURTHER, VALIDATES, "reward_model.rule_weight=0"), []),
        (
            (*WITH_MODEL, *MODEL_ALONE, VALIDATES),
            ["custom_reward_function.validation_only=true must be false, as custom_reward_function.name=null"],
        ),
        (
            (*WITH_MODEL, VALIDATES, "reward_model.weight=0"),
            ["reward_model.weight=0 must not be 0, because nothing else gives a score; try: 1"],
        ),
    ],
)
def test_rule_and_reward_model_together(config, overrides, expected):
    """What either needs of the other. Would not catch weights of absurd sizes."""
    problems = value_problems(config(*overrides))
    assert len(problems) == len(expected)
    assert all(problem.startswith(start) for problem, start in zip(problems, expected, strict=True))


ALONE = ("algorithm.use_kl_in_reward=true", "pools.own.nnodes=1", "actor_rollout_ref.ref.pool=own")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("tensor_model_parallel_size=0", "tensor_model_parallel_size=0 must be >= 1; try: 1"),
        ("virtual_pipeline_model_parallel_size=0", "pipeline_model_parallel_size=0 must be >= 1; try: null"),
        ("make_vocab_size_divisible_by=-2", "make_vocab_size_divisible_by=-2 must be >= 1; try: 1"),
        ("expert_tensor_parallel_size=0", "expert_tensor_parallel_size=0 must be null (as TP) or >= 1; try: null"),
        ("dtype=float17", "dtype=float17 must be one of float32, bfloat16, float16; did you mean: float16"),
    ],
)
def test_who_is_first_in_a_pool_brings_its_layout(config, override, expected):
    """The reference's keys count by themselves where it has its own pool. Would not catch a key that is no layout."""
    given = config(*ALONE, f"actor_rollout_ref.ref.megatron.{override}")
    (problem,) = value_problems(given)
    assert problem.startswith("actor_rollout_ref.ref.megatron.") and problem.endswith(expected)
    assert value_problems(config(f"actor_rollout_ref.ref.megatron.{override}")) == []


def test_only_steps_of_the_decay_go_down_at_its_end(config):
    """Nine last steps of four. Would not catch more of them than the run has steps."""
    keys = ("lr_decay_style=WSD", "lr_decay_steps=4", "lr_wsd_decay_steps=9")
    (problem,) = value_problems(config(*(f"critic.optim.{key}" for key in keys)))
    assert "critic.optim.lr_wsd_decay_steps=9 must be <= lr_decay_steps=4" in problem and problem.endswith("try: 4")
