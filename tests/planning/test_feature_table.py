"""The table of features: every pair is refused once, by its name, with both keys and values, and its way out plans."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault import CORRECTION, CP, GPUS, MEGATRON, ROLLOUT, Case, base_config, good_case
from model_folders import problems, write_model
from teacher_faults import put_teachers
from test_gated_delta_rules import QWEN3_5
from test_model_folder import LATENT

from megatron_rl.config.keys import is_key
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation, shown
from megatron_rl.planning.feature_checks import feature_problems
from megatron_rl.planning.feature_rows import FEATURES
from megatron_rl.planning.feature_table import partners
from megatron_rl.planning.features import ROLE, Feature, Relation
from megatron_rl.planning.preflight import preflight, read_models

GOLDEN = Path(__file__).with_name("feature_messages.txt")
OPTIONS = f"{MEGATRON}.override_transformer_config"
AHEAD, PARTIAL = "trainer.rollout_ahead", "async_training.partial_rollout"
WEIGHTS = {f"{CORRECTION}.rollout_is": "token"}
PLACED = {
    "actor_rollout_ref.hybrid_engine": False,
    f"{ROLLOUT}.nnodes": 1,
    f"{ROLLOUT}.n_gpus_per_node": 2,
    "data.train_batch_size": 64,
}
SETUP: dict[str, dict[str, object]] = {
    "rollout_ahead": {PARTIAL: True} | WEIGHTS,
    "own_pool": PLACED,
    "components": {"algorithm.gdpo_reward_keys": ["score"], f"{ROLLOUT}.n": 2},
    "greedy_baseline": {f"{ROLLOUT}.n": 2},
    "token_baseline": {f"{ROLLOUT}.n": 2},
    "dynamic_sampling": {f"{ROLLOUT}.n": 2},
    "reinforce": {f"{CORRECTION}.bypass_mode": True},
    "over_sampling": {AHEAD: 1, PARTIAL: True} | WEIGHTS,
    "elastic_replicas": {AHEAD: 1} | PLACED | WEIGHTS,
    "multi_turn": {f"{ROLLOUT}.multi_turn.environment.path": "environment.py"},
    "fp8_rollouts": {f"{ROLLOUT}.quantization_block_size": 16} | WEIGHTS,
    "fp8_training": {f"{MEGATRON}.fp8_emulate": True},
    "fp8_emulation": {f"{OPTIONS}.fp8": "hybrid"},
    "dynamic_context_parallel": {CP: 2, GPUS: 12, "actor_rollout_ref.actor.use_dynamic_bsz": True},
    "context_parallel": {GPUS: 12},
    "following_reference": {"actor_rollout_ref.actor.use_kl_loss": True},
    "second_buffer": {AHEAD: 1, PARTIAL: True} | WEIGHTS,
    "gradient_buckets": {f"{MEGATRON}.override_ddp_config.overlap_grad_reduce": True},
    "overlapped_parameters": {f"{MEGATRON}.override_ddp_config.overlap_grad_reduce": True},
    "rare_transfers": {AHEAD: 1, PARTIAL: True} | WEIGHTS,
    "merged_adapters": {"actor_rollout_ref.model.lora.rank": 8},
    "pretraining": {"ptx.files": "examples.parquet"},
    "mtp_training": {f"{ROLLOUT}.speculative": "mtp"},
}
"""What a feature needs beside its own key to be on with no complaint but the pair's."""
BOTH: dict[tuple[str, str], dict[str, object]] = {
    ("rollout_ahead", "own_pool"): {PARTIAL: False},
    ("fp8_rollouts", "importance_weights"): {f"{CORRECTION}.rollout_is": None},
    ("rollout_ahead", "correction"): {f"{CORRECTION}.rollout_is": None},
    ("reinforce", "bypass"): {f"{CORRECTION}.bypass_mode": False},
    ("over_sampling", "rollout_ahead"): {AHEAD: 0},
    ("dynamic_sampling", "greedy_baseline"): {AHEAD: 1, PARTIAL: True} | WEIGHTS,
    ("dynamic_sampling", "images"): {
        "actor_rollout_ref.hybrid_engine": False,
        f"{ROLLOUT}.nnodes": 1,
        AHEAD: 1,
        PARTIAL: True,
    }
    | WEIGHTS,
    ("over_sampling", "deterministic"): PLACED | {AHEAD: 2},
    ("elastic_replicas", "rollout_ahead"): {AHEAD: 0},
    ("elastic_replicas", "own_pool"): {"actor_rollout_ref.hybrid_engine": None, f"{ROLLOUT}.nnodes": 0, PARTIAL: True},
    ("fp8_training", "fp8_emulation"): {f"{MEGATRON}.fp8_emulate": False},
    ("fp8_training", "transformer_engine"): {f"{MEGATRON}.fp8_emulate": False, "trainer.device": "cuda"},
    ("fp8_emulation", "fp8_training"): {f"{OPTIONS}.fp8": None},
    ("dynamic_context_parallel", "context_parallel"): {CP: 1, GPUS: 6},
    ("following_reference", "reference"): {
        "actor_rollout_ref.actor.use_kl_loss": False,
        "algorithm.use_kl_in_reward": False,
    },
    ("gradient_buckets", "overlapped_gradients"): {f"{MEGATRON}.override_ddp_config.overlap_grad_reduce": False},
    ("overlapped_parameters", "overlapped_gradients"): {f"{MEGATRON}.override_ddp_config.overlap_grad_reduce": False},
    ("mtp_training", "mtp_drafts"): {f"{ROLLOUT}.speculative": None},
    ("value_estimator", "critic"): {"critic.enable": False},
    ("mtp_drafts", "over_sampling"): {PARTIAL: False},
}
"""What only the two together ask for; of a need, what turns the other feature off."""
EXPERTS = {"router_replay_r2", "router_replay_r3", "returned_experts", "balance_loss", "router_z_loss", "expert_bias"}
"""Features of models with experts."""
OF_DELTA = ("speculative_decoding", "shared_prompts")
"""What the gated delta rule does not have."""
ELSEWHERE = {("following_reference", "live_reference")}
"""Pairs of tasks, which have a test of their own."""
TAUGHT = {"own_teacher", "teachers_prompt", "students_top", "exact_divergence"}
"""Features whose keys have names of the user's own."""


def pairs() -> Iterator[tuple[Feature, Relation, bool]]:
    for row in FEATURES.values():
        yield from ((row, pair, True) for pair in row.needs if (row.name, pair.other) not in ELSEWHERE)
        yield from ((row, pair, False) for pair in row.excludes)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> RunConfig:
    return base_config(tmp_path_factory.mktemp("base"))


def turn_on(case: Case, row: Feature) -> None:
    case.set(SETUP.get(row.name, {}))
    if row.name == "reward_model":
        path = write_model(case.folder / "classifier", architectures=["Qwen2ForSequenceClassification"], num_labels=1)
        case.set({"reward_model.model.path": path})
    if row.name in TAUGHT:
        mode = row.turned_on.get("distillation.distillation_loss.loss_mode", "k3")
        given = ["t.prompt_key=hint"] if row.name == "teachers_prompt" else []
        loss = f"distillation.distillation_loss.loss_mode={mode}"
        put_teachers(
            case, "t.model_path=TEACHER", *given, loss, "distillation.distillation_loss.use_policy_gradient=false"
        )
    else:
        case.set(row.turned_on_for())


def found_in(case: Case, config_only: bool = True) -> list[Violation]:
    models, _ = read_models(case.config, config_only=config_only)
    return feature_problems(case.config, models)


def refusals() -> list[object]:
    return [pytest.param(*each, id=f"{each[0].name}-{each[1].other}") for each in pairs()]


def broken(base: RunConfig, folder: Path, row: Feature, pair: Relation, is_need: bool) -> tuple[Case, Violation]:
    """A configuration in which a pair is on, and its one violation."""
    folder.mkdir(exist_ok=True)
    case = good_case(folder, base, experts=bool({row.name, pair.other} & EXPERTS))
    if not is_need:
        turn_on(case, FEATURES[pair.other])
    turn_on(case, row)
    case.set(BOTH.get((row.name, pair.other), {}))
    keys = {key for key in FEATURES[pair.other].turned_on_for() if "NAME" not in key}
    about = [one for one in found_in(case) if one.feature == row.name and pair.why in one.rule]
    about = [one for one in about if keys & set(one.settings) or pair.other == "own_pool" or not keys]
    assert len(about) == 1, "\n".join(map(str, found_in(case)))
    return case, about[0]


@pytest.mark.parametrize(("row", "pair", "is_need"), refusals())
def test_a_pair_is_refused_once_and_its_way_out_plans(base, tmp_path, row, pair, is_need):
    """On a small configuration with both. Would not catch a pair that the table lacks."""
    case, one = broken(base, tmp_path, row, pair, is_need)
    named = [set(feature.turned_on_for()) for feature in (row, FEATURES[pair.other]) if feature.name not in TAUGHT]
    assert all(keys & set(one.settings) for keys in named), one
    assert len(one.settings) >= 2 and all(f"{key}={shown(value)}" in str(one) for key, value in one.settings.items())
    assert one.nearest, one
    case.set(one.nearest)
    left = [str(other) for other in preflight(case.config, config_only=True) if set(other.settings) & set(one.nearest)]
    assert not left and not [other for other in found_in(case) if other.rule == one.rule], left


def test_messages_of_the_table(base, tmp_path):
    """Every third message as a user sees it, in a file to read in review: `feature_messages.txt` is made anew by
    deleting it. Would not catch a message that is hard to understand.
    """
    lines = []
    for number, (row, pair, is_need) in enumerate(pairs()):
        if number % 3 == 0:
            _, one = broken(base, tmp_path / str(number), row, pair, is_need)
            lines.append(f"{row.name}, {pair.other}\n    {str(one).replace(str(tmp_path / str(number)), 'FOLDER')}")
    text = "\n".join(lines) + "\n"
    if not GOLDEN.exists():
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize(
    ("name", "device", "changes"),
    [
        ("router_replay_r3", "cpu", LATENT),
        ("shared_prompts", "cpu", LATENT),
        ("mtp_drafts", "cpu", {}),
        *((name, "cpu", QWEN3_5) for name in OF_DELTA),
        *((name, "cpu", {}) for name in sorted(EXPERTS)),
    ],
)
def test_a_condition_on_the_model(config, tmp_path, name, device, changes):
    """It names the feature and the folder, and its way out ends it. Would not catch a condition that is missing."""
    path = write_model(tmp_path / "model", **changes)
    case, row = Case(config, tmp_path), FEATURES[name]
    case.set({"trainer.device": device})
    turn_on(case, row)
    about = [
        one for one in found_in(case, name != "mtp_drafts") if one.feature == name and path in one.settings.values()
    ]
    assert len(about) == 1 and about[0].nearest, about
    case.set(about[0].nearest)
    assert not [one for one in found_in(case) if one.rule == about[0].rule]


@pytest.mark.parametrize(
    "row", [row for row in FEATURES.values() if row.refused_unproven and row.name != "expert_adapters"]
)
def test_what_no_gpu_has_run_waits_for_one_switch(base, tmp_path, row):
    """Would not catch a GPU on which it fails."""
    case = good_case(tmp_path, base, experts=False)
    turn_on(case, row)
    case.set({"trainer.device": "cuda"})
    about = [one for one in found_in(case) if one.feature == row.name and "no GPU has run it" in one.rule]
    assert len(about) == 1 and about[0].settings["trainer.device"] == "cuda"
    case.set({"trainer.allow_unproven": True})
    assert not [one for one in found_in(case) if "no GPU" in one.rule]


def test_the_table_is_whole():
    """Names and keys exist, a pair is in one row alone, and reasons are sentences. Would not catch a false reason."""
    for row in FEATURES.values():
        assert all(is_key(key.replace("NAME", "x")) for key in row.turned_on_for()), row.name
        others = [pair.other for pair in (*row.needs, *row.excludes)]
        assert len(others) == len(set(others)) and set(others) <= FEATURES.keys() - {row.name}, row.name
        assert all(row.name not in [pair.other for pair in FEATURES[other.other].excludes] for other in row.excludes)
        assert all(pair.why and pair.why[-1] not in ".;" for pair in (*row.needs, *row.excludes))
    assert all(partners(FEATURES[other])[row.name] for row in FEATURES.values() for other in partners(row))


def on_keys(key: str) -> set[str]:
    """The features that a key turns on, or that it is a key of."""
    return {row.name for row in FEATURES.values() if key in row.turned_on_for()}


def test_no_other_check_is_about_two_features(base, tmp_path):
    """Each feature alone, on both devices: what is said about keys of two features has its row's name. Would not catch
    a check that only a rare value reaches.
    """
    for row in FEATURES.values():
        for device in ("cpu", "cuda"):
            (folder := tmp_path / f"{row.name}-{device}").mkdir()
            case = good_case(folder, base, experts=row.name in EXPERTS)
            turn_on(case, row)
            case.set({"trainer.device": device})
            for one in preflight(case.config, config_only=True):
                named = [on_keys(key) for key in one.settings]
                if any(not left & right for left in named for right in named if left and right):
                    assert one.feature in FEATURES, one


RULES = sorted(path for path in Path("megatron_rl").rglob("*.py") if path.stem.endswith("_rules"))


def text_of(node: ast.expr, names: dict[str, object]) -> str:
    """A key as far as it can be read: f-strings with the module's constants put in, and "" for the rest."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, names)
    found = node.value if isinstance(node, ast.Constant) else names.get(node.id) if isinstance(node, ast.Name) else ""
    return found if isinstance(found, str) else text_of(found, names) if isinstance(found, ast.expr) else ""


@pytest.mark.parametrize("path", [*RULES, Path("megatron_rl/config/validate.py")], ids=lambda path: path.stem)
def test_no_rule_file_refuses_a_pair_by_hand(path):
    """By the keys of its violations. Would not catch keys that are made while it runs, which the test above sees."""
    module = importlib.import_module(".".join(path.with_suffix("").parts))
    tails = {key.replace(ROLE, ""): row.name for row in FEATURES.values() for key in row.turned_on}
    for function in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)):
        names = dict(vars(module))
        for node in (node for node in ast.walk(function) if isinstance(node, ast.Assign)):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                names |= {name.id: value for name, value in pairs if isinstance(name, ast.Name)}
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            is_one = isinstance(call.func, ast.Name) and call.func.id == "Violation" and call.args
            if is_one and isinstance(call.args[0], ast.Dict) and not any(k.arg == "feature" for k in call.keywords):
                keys = [text_of(key, names) for key in call.args[0].keys if key is not None]
                rows = {name for key in keys for tail, name in tails.items() if key and key.endswith(tail)}
                assert len(keys) < 2 or len(rows) < 2, f"{path}:{call.lineno} {keys}"


def test_problems_are_in_one_order(base, tmp_path):
    """Twice the same. Would not catch an order that no one expects."""
    case = good_case(tmp_path, base, experts=False)
    for name in ("cuda_graphs", "fp8_rollouts", "dropped_weights", "mtp_drafts"):
        turn_on(case, FEATURES[name])
    first = problems(case.config)
    assert first == problems(case.config) and len(first) >= 3
