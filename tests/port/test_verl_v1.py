"""verl 0.9's V1 trainer through `port`: which samples are trained is decided by its keys, so none is lost unsaid."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.verl_compat.translate import Kind
from megatron_rl.planning.checked_config import checked
from megatron_rl.port.port import Ported, port

SCRIPTS = Path(__file__).parent / "verl_scripts"
V1, SAMPLER = "trainer.v1", "trainer.v1.sampler"
AHEAD, PARTIAL = "trainer.rollout_ahead", "async_training.partial_rollout"
SEPARATE, COLOCATE = f"{V1}.trainer_mode=separate_async", f"{V1}.trainer_mode=colocate_async"
MINI, BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size", "data.train_batch_size"


def values(result: Ported) -> dict:
    return {setting.key: setting.value for setting in result.settings}


def reasons(result: Ported, kind: Kind, ending: str) -> list[str]:
    return [note.reason for note in result.of(kind) if note.setting.key.endswith(ending)]


@pytest.mark.parametrize(
    ("arguments", "ahead"),
    [
        ([SEPARATE], 1),
        ([SEPARATE, f"{V1}.separate_async.num_warmup_batches=3"], 3),
        ([COLOCATE, f"{V1}.colocate_async.num_warmup_batches=1.5"], 2),
        ([COLOCATE, f"{V1}.separate_async.num_warmup_batches=3"], 1),
        ([SEPARATE, f"{V1}.separate_async.num_warmup_batches=9"], 7),
        ([SEPARATE, f"{V1}.separate_async.num_warmup_batches=9", f"{SAMPLER}.max_off_policy_threshold=null"], 9),
        ([COLOCATE, f"{SAMPLER}.max_off_policy_threshold=1"], 0),
        ([SEPARATE, f"{V1}.separate_async.num_warmup_batches=0"], 0),
    ],
)
def test_batches_in_generation_and_the_bound_on_their_age_are_steps_ahead(arguments, ahead):
    """By hand: verl's defaults are one batch and 8 versions, and the batch that is trained is the first of 8.

    Would not catch another meaning in a later verl.
    """
    result = port(None, arguments, {})
    assert result.features == [] and values(result)[AHEAD] == ahead and values(result)[PARTIAL] is True
    assert values(result).get("actor_rollout_ref.hybrid_engine") is (False if arguments[0] == SEPARATE else None)
    assert (values(result).get("algorithm.rollout_correction.rollout_is") == "token") == (ahead > 0)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ([SEPARATE, f"{SAMPLER}.max_off_policy_strategy=wait"], Kind.RENAMED, "waits for the responses to its own"),
        ([SEPARATE, f"{SAMPLER}.max_off_policy_strategy=drop"], Kind.DIFFERS, "groups that finish first"),
        ([f"{SAMPLER}.max_off_policy_strategy=drop"], Kind.IGNORED, "one version of the weights"),
        ([f"{SAMPLER}.max_off_policy_threshold=8"], Kind.IGNORED, "one version of the weights"),
        ([f"{V1}.colocate_async.num_warmup_batches=2"], Kind.IGNORED, "trainer_mode=colocate_async alone"),
        ([COLOCATE, f"{V1}.separate_async.parameter_sync_step=7"], Kind.IGNORED, "trainer_mode=separate_async alone"),
        ([SEPARATE, f"{V1}.separate_async.hybrid_rollout.enable_switch=true"], Kind.IGNORED, "only speed"),
        ([f"{SAMPLER}.sync_refill_failed_groups=true"], Kind.IGNORED, "no group fails here"),
        ([SEPARATE, "trainer.use_v1=false"], Kind.IGNORED, "older trainer"),
    ],
)
def test_each_key_is_translated_or_says_why_not(arguments, kind, text):
    """The last argument, or with the older trainer the first. Would not catch a reason that is wrong."""
    result = port(None, arguments, {})
    key = (arguments[0] if "use_v1" in arguments[-1] else arguments[-1]).partition("=")[0]
    (reason,) = reasons(result, kind, key)
    assert text in reason and result.features == []
    assert (values(result).get("async_training.straggler_policy") == "wait") == (kind is Kind.RENAMED)


@pytest.mark.parametrize(
    ("arguments", "feature"),
    [
        ([f"{V1}.trainer_mode=remote"], "modes of verl's V1"),
        ([SEPARATE, f"{V1}.separate_async.num_warmup_batches=-1"], "this number of batches in generation"),
        ([SEPARATE, f"{SAMPLER}.max_off_policy_threshold=0"], "this bound on the staleness"),
        ([SEPARATE, f"{SAMPLER}.max_off_policy_strategy=keep"], "this strategy for samples"),
        ([SEPARATE, f"{V1}.separate_async.parameter_sync_step=3"], "weight transfers that are not one"),
        ([SEPARATE, f"{SAMPLER}.custom_sampler.path=mine.py"], "custom samplers"),
        ([f"{SAMPLER}.poll=3"], f"the key {SAMPLER}.poll, which is in no table"),
        (["skip.rollout_tq.enable=true", "skip.rollout_tq.steps=[1]"], "training on stored responses"),
        (["actor_rollout_ref.rollout.single_turn_response_length=9"], "a length limit per turn"),
        (["data.custom_cls.path=mine.py", "data.custom_cls.name=Mine"], "custom dataset classes"),
    ],
)
def test_what_would_train_something_else_is_refused(arguments, feature):
    """By the feature's name. Would not catch a key that no case has."""
    (found,) = port(None, arguments, {}).features
    assert found.startswith(feature)


def test_a_script_that_only_validates_is_kept():
    """Would not catch what `train` makes of the key: tests/e2e/test_eval_runs.py."""
    result = port(None, ["trainer.val_only=true"], {})
    assert result.features == [] and values(result)["trainer.val_only"] is True


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["actor_rollout_ref.actor.model_engine=megatron", "critic.model_engine=megatron"], {}),
        (["+actor_rollout_ref.actor.megatron.override_transformer_config.use_naive_l2norm=True"], {}),
        (["data.max_response_length=99", "actor_rollout_ref.rollout.single_turn_response_length=99"], {}),
        (["actor_rollout_ref.rollout.full_determinism=true"], {}),
        ([SEPARATE, "actor_rollout_ref.rollout.full_determinism=true"], {"async_training.deterministic": True}),
        (["data.train_max_samples=0", "data.val_max_samples=null", "data.custom_cls.path=null"], {}),
        (["skip.rollout.enable=false", "skip.rollout.action=cache", "skip.async_rollout.dump_dir=/x"], {}),
        ([SEPARATE, f"{BATCH}=0", f"{MINI}=16", f"{V1}.separate_async.parameter_sync_step=2"], {BATCH: 32}),
        ([SEPARATE, f"{BATCH}=0", "data.gen_batch_size=1", f"{MINI}=16"], {BATCH: 64}),
        (["rollout.total_rollout_steps=640", f"{BATCH}=0", "data.gen_batch_size=1", f"{MINI}=16"], {BATCH: 16}),
    ],
)
def test_what_changes_nothing_is_ignored_and_sizes_of_0_are_found(arguments, expected):
    """Nothing is refused. Would not catch a key that ought to be."""
    result = port(None, arguments, {})
    assert result.features == [] and result.of(Kind.DIFFERS) == []
    found = values(result)
    assert {key: found[key] for key in expected} == expected and "data.gen_batch_size" not in found
    ported = {argument.partition("=")[0].lstrip("+") for argument in arguments} & found.keys()
    assert ported <= {BATCH, MINI, "data.max_response_length"}


def test_some_rows_of_a_file_are_asked_for_alike():
    """verl's keys have verl's meaning: tests/data/test_prompt_dataset.py. Would not catch a renamed key of verl's."""
    result = port(None, ["data.train_max_samples=100", "data.val_max_samples=-1"], {})
    assert result.features == [] and values(result)["data.train_max_samples"] == 100


@pytest.mark.parametrize("mode", [SEPARATE, COLOCATE])
def test_a_v1_script_passes_plan(tmp_path, monkeypatch, mode):
    """A public GRPO script in both modes, with every key of its group. Would not catch what `plan` does not check."""
    monkeypatch.chdir(SCRIPTS)
    name = "examples_grpo_trainer_run_qwen2-7b_math_megatron.args"
    arguments = [line for line in Path(name).read_text().splitlines() if line.strip()]
    group = f"{V1}.{mode.rpartition('=')[2]}"
    arguments += ["actor_rollout_ref.rollout.nnodes=1", f"{BATCH}=1024", f"{MINI}=256", mode]
    arguments += [f"{group}.num_warmup_batches=2", f"{SAMPLER}.max_off_policy_strategy=wait"]
    arguments += [f"{group}.parameter_sync_step=4"] if mode == SEPARATE else ["actor_rollout_ref.rollout.nnodes=0"]
    result = port(None, arguments, {})
    file = tmp_path / "v1.yaml"
    file.write_text(result.yaml())
    found = checked(file, [], without_files=True)
    assert result.features == [] and [str(violation) for violation in found.violations] == []
    assert found.config is not None and found.config.trainer.rollout_ahead == 2


@pytest.mark.parametrize("name", ["one_step_off_ppo_megatron_trainer.yaml", "fully_async_ppo_megatron_trainer"])
def test_the_files_of_verls_asynchronous_programs_are_its_defaults(tmp_path, name):
    """One step off has answers of one version. Would not catch a file of the same name in the script's folder."""
    program = "one_step_off_policy.main_ppo" if "one_step" in name else "fully_async_policy.fully_async_main"
    script = tmp_path / "run.sh"
    script.write_text(f"python -m verl.experimental.{program} --config-path=config --config-name='{name}' a.b=null\n")
    result = port(script, ["trainer.nnodes=2"], {})
    assert result.features == ["the key a.b, which is in no table"]
    assert values(result).get(PARTIAL) is (False if "one_step" in name else None)


@pytest.mark.parametrize(
    ("arguments", "ep"),
    [
        # TensorRT-LLM's 2 x 2 in the stored script of Qwen3-30B, attention DP, and sizes that need nothing of verl's.
        (["tensor_model_parallel_size=4", "expert_parallel_size=2", "moe_tensor_parallel_size=2"], 4),
        (["tensor_model_parallel_size=2", "expert_parallel_size=4", "data_parallel_size=2"], 4),
        (["tensor_model_parallel_size=2", "expert_parallel_size=1", "data_parallel_size=2"], 1),
        (["tensor_model_parallel_size=4", "expert_parallel_size=4", "moe_tensor_parallel_size=1"], 4),
        (["tensor_model_parallel_size=4", "expert_parallel_size=2"], 2),
        (["expert_parallel_size=2"], 2),
    ],
)
def test_experts_on_ranks_keep_the_users_number_without_keys_of_verl(arguments, ep):
    """A number that vLLM cannot have is refused later, by its own key. Would not catch another meaning in verl."""
    rollout = "actor_rollout_ref.rollout"
    assert values(port(None, [f"{rollout}.{each}" for each in arguments], {}))[f"{rollout}.expert_parallel_size"] == ep
