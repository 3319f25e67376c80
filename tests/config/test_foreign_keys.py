"""verl's keys: what the table says of them, and that what nobody knows changes nothing."""

from __future__ import annotations

import re
import string
from functools import cache

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_rl.config.keys import KEYS, follows, is_key, value_of
from megatron_rl.config.load import read_override, read_settings
from megatron_rl.config.problems import like_name
from megatron_rl.config.setting import Setting, final_settings
from megatron_rl.config.verl_compat.conversions import CONVERSIONS
from megatron_rl.config.verl_compat.key_rows import ANY, MACROS, alike, compiled, table
from megatron_rl.config.verl_compat.translate import Kind, translate

BASE = {
    "data.train_files": "a.parquet",
    "data.val_files": "b.parquet",
    "actor_rollout_ref.model.path": "model",
    "trainer.device": "cpu",
    "trainer.nnodes": 2,
    "actor_rollout_ref.actor.optim.lr": 3e-4,
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": 1,
    "actor_rollout_ref.rollout.n": 4,
}
REF, STAGE = "actor_rollout_ref.ref.megatron", "num_layers_in_last_pipeline_stage"
VAL_KWARGS = "actor_rollout_ref.rollout.val_kwargs"
OVERLONG = "reward_model.overlong_buffer"
ROLE_KEY, MEGATRON = "actor_rollout_ref.actor", "actor_rollout_ref.actor.megatron"


def settings_of(values: dict) -> list[Setting]:
    return [Setting(key, value, "test") for key, value in values.items()]


def translated(**values):
    return translate(settings_of(values), is_key)


def notes(*overrides: str) -> list[tuple[str, dict, str]]:
    found = translate([setting for text in overrides for setting in read_override(text)], is_key)
    return [(note.kind.value, note.became, note.feature) for note in found.notes]


def samples(pattern: str) -> list[str]:
    """Keys that a pattern of the table is about: each alternative once."""
    for macro, text in MACROS.items():
        pattern = pattern.replace(macro, text.replace("(", "{").replace(")", "}"))
    pattern = pattern.replace("**", "some.thing").replace("*", "x")
    found = [pattern]
    while any("{" in one for one in found):
        grown = []
        for one in found:
            match = re.search(r"\{([^{}]*)\}", one)
            parts = [] if match is None else match[1].split(",")
            grown += [one] if match is None else [one[: match.start()] + part + one[match.end() :] for part in parts]
        found = grown
    return found


SAMPLES = sorted({key for row in table() for pattern in row.keys for key in samples(pattern)})


def test_every_row_can_be_met_and_says_why():
    """Targets are keys, conversions exist, each row has a reason or a feature. Would not catch a wrong reason."""
    for row in table():
        assert row.why or row.feature or row.to or row.convert, row.keys
        assert row.feature is None or row.instead, row.keys
        assert row.convert is None or row.convert in CONVERSIONS
        assert not row.nothing_at or row.why, row.keys
        for pattern in row.keys:
            assert all(compiled(pattern).fullmatch(key) for key in samples(pattern)), pattern
    for key in SAMPLES:
        for value in (None, "x"):
            for note in translate(settings_of({key: value}), is_key).notes:
                assert all(is_key(name) for name in note.became), (key, note)


def test_no_row_ignores_what_the_schema_has():
    """A known key may be ignored at some values, never at any. Would not catch a value that ought to count."""
    for key in KEYS:
        rows = [row for row in table() if row.match(key) and row.nothing_at == ANY and not row.keeps_known]
        allowed = key.endswith("override_transformer_config.recompute_modules")
        assert not rows or allowed, key


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.floats(0, 2), st.sampled_from(["x", "fp8", "true"]))
WORDS = st.text(string.ascii_lowercase + "_.", min_size=1, max_size=12)


@st.composite
def typos(draw) -> str:
    key = draw(st.sampled_from(sorted(KEYS)))
    place = draw(st.integers(0, len(key)))
    kind = draw(st.sampled_from(["insert", "drop", "swap", "word"]))
    if kind == "insert":
        return key[:place] + draw(st.sampled_from(string.ascii_lowercase)) + key[place:]
    if kind == "drop":
        return key[:place] + key[place + 1 :]
    if kind == "swap":
        return key[:place] + key[place + 1 : place + 2] + key[place : place + 1] + key[place + 2 :]
    return key.rpartition(".")[0] + "." + draw(WORDS).strip(".")


KEYS_THAT_NOBODY_HAS = {"key": st.one_of(typos(), st.sampled_from(SAMPLES)), "value": VALUES}


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(**KEYS_THAT_NOBODY_HAS)
@example(key=f"{MEGATRON}.qat.enable", value=True)
@example(key="trainer.total_epoch", value=15)
@example(key="reward.custom_reward_function.reward_kwargs.some.thing", value=None)
def test_no_unknown_key_changes_the_verdict_on_a_known_one(key, value):
    """What is read with it equals what is read without, but for what a note says it became.

    Over the table and random slips of known keys. Would not catch a note that says something else than what was meant.
    """
    check_that_known_keys_stay(key, value)


@pytest.mark.exhaustive
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(**KEYS_THAT_NOBODY_HAS)
def test_no_unknown_key_of_many_changes_the_verdict(key, value):
    """The same, for longer."""
    check_that_known_keys_stay(key, value)


def check_that_known_keys_stay(key, value) -> None:
    if is_key(key):
        return
    reading, without = read_settings(settings_of(BASE | {key: value})), plain()
    became = {name for note in reading.notes for name in note.became}
    assert reading.config is not None and without is not None
    named = {name for violation in reading.violations for name in violation.settings}
    assert named <= became | {key}, "a fault of another key"
    if reading.config == without:
        return
    for name in KEYS:
        grew = any(one.startswith(f"{name}.") for one in became)  # a key under which users name their own
        if name not in became and not grew and not _follows_one_of(name, became):
            assert value_of(reading.config, name) == value_of(without, name), (name, key)


@cache
def plain():
    """What the settings come to by themselves."""
    return read_settings(settings_of(BASE)).config


def _follows_one_of(name: str, keys: set[str]) -> bool:
    while name in follows():
        name = follows()[name]
        if name in keys:
            return True
    return False


def test_a_feature_is_named_and_hides_nothing():
    """Quantization-aware training is that, and no misspelt key. Would not catch a feature without a row."""
    reading = read_settings(settings_of(BASE | {f"{MEGATRON}.qat.enable": True}))
    (violation,) = reading.violations
    assert "asks for quantization-aware training, which is not supported" in str(violation) and violation.nearest == {}
    assert read_settings(settings_of(BASE | {f"{MEGATRON}.qat.enable": False})).violations == []
    assert reading.config is not None
    assert reading.config.actor_rollout_ref.actor.megatron.context_parallel_size == 1


def test_context_parallelism_in_all_its_spellings():
    """verl's key, the same among Megatron's own options, and transformer-engine's choice of the way; of all roles.

    Would not catch a role that does not follow the actor.
    """
    override = f"{MEGATRON}.override_transformer_config"
    plain = {f"{MEGATRON}.context_parallel_size": 2, f"{override}.cp_comm_type": None}
    for said in (plain, {f"{override}.context_parallel_size": 2, f"{override}.cp_comm_type": "a2a"}):
        reading = read_settings(settings_of(BASE | said))
        assert reading.violations == [] and reading.config is not None
        way = said[f"{override}.cp_comm_type"] or "p2p"
        shared = reading.config.actor_rollout_ref
        for megatron in (shared.actor.megatron, shared.ref.megatron, reading.config.critic.megatron):
            assert megatron.context_parallel_size == 2
            assert megatron.override_transformer_config.cp_comm_type == way


@pytest.mark.parametrize(
    ("override", "kind", "became"),
    [
        ("trainer.max_actor_ckpt_to_keep=3", "renamed", {"trainer.max_ckpt_to_keep": 3}),
        ("trainer.test_freq=-1", "renamed", {"trainer.test_freq": 0}),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=-1", "renamed", {f"{ROLE_KEY}.optim.lr_warmup_steps": 0}),
        (
            "+actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded",
            "renamed",
            {"actor_rollout_ref.rollout.weight_deltas": True},
        ),
        ("actor_rollout_ref.actor.grad_clip=0.5", "renamed", {f"{ROLE_KEY}.optim.clip_grad": 0.5}),
        ("actor_rollout_ref.rollout.name=sglang", "renamed", {"actor_rollout_ref.rollout.name": "vllm"}),
        (
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=128",
            "renamed",
            {"reward_model.overlong_buffer.len": 128},
        ),
        ("reward.reward_kwargs.overlong_buffer_cfg.enable=true", "renamed", {f"{OVERLONG}.enable": True}),
        ("reward.custom_reward_function.path=r.py", "renamed", {"custom_reward_function.path": "r.py"}),
        (f"{ROLE_KEY}.fsdp_config.optimizer_offload=True", "renamed", {f"{MEGATRON}.optimizer_offload": True}),
        ("actor_rollout_ref.actor.fsdp_config.param_offload=True", "ignored", {}),
        ("actor_rollout_ref.ref.fsdp_config.param_offload=True", "renamed", {f"{REF}.param_offload": True}),
        (f"{MEGATRON}.param_offload=True", "ignored", {}),
        (f"++{MEGATRON}.override_transformer_config.moe_permute_fusion=True", "ignored", {}),
        (f"+{MEGATRON}.override_transformer_config.{STAGE}=6", "renamed", {f"{MEGATRON}.{STAGE}": 6}),
        ("custom_reward_function.name=null", "ignored", {}),
        ("algorithm.filter_groups.metric=seq_reward", "renamed", {"algorithm.filter_groups.metric": "score"}),
        ("algorithm.filter_groups.metric=reward", "renamed", {"algorithm.filter_groups.metric": "score"}),
        ("algorithm.filter_groups.max_inflight_gen_batches=2", "ignored", {}),
        (f"{VAL_KWARGS}.temperature=0", "renamed", {f"{VAL_KWARGS}.do_sample": False}),
        ("trainer.device=npu", "renamed", {"trainer.device": "cuda"}),
        ("reward.reward_model.model.input_tokenizer=m", "renamed", {"reward_model.model.input_tokenizer": "m"}),
        ("reward.max_length=64", "renamed", {"reward_model.max_length": 64}),
        ("optim.lr=0.5", "renamed", {f"{ROLE_KEY}.optim.lr": 0.5}),
        ("model.partial_pretrain=m", "renamed", {"actor_rollout_ref.model.path": "m"}),
        ("data.micro_batch_size_per_gpu=3", "renamed", {f"{ROLE_KEY}.ppo_micro_batch_size_per_gpu": 3}),
        ("engine.tensor_model_parallel_size=2", "renamed", {f"{MEGATRON}.tensor_model_parallel_size": 2}),
        ("reward.reward_model.max_length=64", "renamed", {"reward_model.max_length": 64}),
        (f"{MEGATRON}.router_replay.mode=R3", "renamed", {f"{ROLE_KEY}.router_replay.mode": "R3"}),
        (f"{ROLE_KEY}.router_replay.record_file=/x", "ignored", {}),
    ],
)  # fmt: skip
def test_what_keys_become(override, kind, became):
    """By hand. Would not catch a row that is not listed here."""
    assert notes(override) == [(kind, became, "")]


def test_a_key_of_the_schema_is_not_renamed_to_itself():
    """A row of several spellings has the schema's own among them. Would not catch a row that is not listed here."""
    assert notes(f"{OVERLONG}.len=128", f"{OVERLONG}.enable=true", "trainer.total_epochs=2") == []


def test_graphs_are_left_out_on_cpus_only():
    """verl's scripts ask for them wherever they run. Would not catch a device that is named later."""
    graphs = "actor_rollout_ref.rollout.enforce_eager=False"
    assert notes(graphs, "trainer.device=cpu") == [("ignored", {}, "")]
    assert notes(graphs) == notes(graphs, "trainer.device=cuda") == []
    for device, eager in (("cpu", True), ("cuda", False)):
        texts = (f"trainer.device={device}", graphs)
        reading = read_settings([*settings_of(BASE), *(one for text in texts for one in read_override(text))])
        assert reading.config is not None and reading.violations == []
        assert reading.config.actor_rollout_ref.rollout.enforce_eager is eager


def test_tools_and_turns_of_verl_have_keys_here():
    """By hand: where tools may be named, whether they ask for turns, and the user's turns, one fewer than the policy's.

    Would not catch a loop of the user's own; the endpoint is for those.
    """
    turns = "actor_rollout_ref.rollout.multi_turn"
    tools = {f"{turns}.tool_config_path": "t.yaml"}
    assert notes(f"{turns}.tool_config_path=t.yaml") == [("renamed", tools | {f"{turns}.enable": True}, "")]
    assert notes(f"{turns}.tool_config_path=t.yaml", f"{turns}.enable=false") == []
    [(_, became, _)] = notes("data.function_tool_path=t.py")
    assert became == {f"{turns}.function_tool_path": "t.py"}
    assert notes(f"{turns}.max_user_turns=2")[0][1] == {f"{turns}.max_assistant_turns": 3}
    both = notes(f"{turns}.max_user_turns=4", f"{turns}.max_assistant_turns=3")
    assert both[0][1] == {f"{turns}.max_assistant_turns": 3}
    assert notes("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent")[0][0] == "ignored"


@pytest.mark.parametrize(
    ("override", "feature"),
    [
        ("reward_model.model.lora_rank=8", "LoRA"),
        ("actor_rollout_ref.model.lora.lora_B_init_method=xavier", "another initialisation of B"),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=4", "Ulysses sequence parallelism"),
        ("actor_rollout_ref.rollout.multi_turn.interaction_config_path=asks.yaml", "verl's interactions"),
        (f"+{MEGATRON}.override_transformer_config.fp4=e2m1", "FP4 training"),
        ("reward_model.reward_manager=batch", "reward managers of this kind"),
        ("actor_rollout_ref.ref.router_replay.mode=R2", "router replay of roles that are not the actor"),
        (f"+{MEGATRON}.override_transformer_config.new_thing=3", "Megatron's option new_thing"),
    ],
)
def test_features_have_names(override, feature):
    """By hand. Would not catch a feature whose switch is another key."""
    assert [(kind, name) for kind, _, name in notes(override)] == [("not supported", feature)]


ACTORS, CANONICAL = "actor_rollout_ref.model", {"actor_rollout_ref.model.lora.type": "canonical_lora"}


DRAFTS = "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"{DRAFTS}.method=ngram", [("renamed", {f"{ROLLOUT}.speculative": "ngram"}, "")]),
        (f"{DRAFTS}.model='[ngram]'", [("renamed", {f"{ROLLOUT}.speculative": "ngram"}, "")]),
        (
            f"{DRAFTS}={{method: suffix, num_speculative_tokens: 8, suffix_decoding_max_tree_depth: 24}}",
            [
                ("renamed", {f"{ROLLOUT}.speculative": "earlier"}, ""),
                ("renamed", {f"{ROLLOUT}.num_speculative_tokens": 8}, ""),
                ("renamed", {f"{ROLLOUT}.prompt_lookup_max": 24}, ""),
            ],
        ),
        (f"{DRAFTS}.suffix_decoding_min_token_prob=0.2", [("ignored", {}, "")]),
        (
            f"{DRAFTS}.disable_by_batch_size=16",
            [("renamed", {f"{ROLLOUT}.speculative_disable_by_batch_size": 16}, "")],
        ),
        (f"{DRAFTS}.prompt_lookup_min=3", [("renamed", {f"{ROLLOUT}.prompt_lookup_min": 3}, "")]),
        (f"{DRAFTS}.method=eagle3", [("not supported", {}, "speculative decoding of this kind")]),
        (f"{DRAFTS}.quantization=fp8", [("not supported", {}, "the engine's option speculative_config.quantization")]),
        (f"{DRAFTS}.method=deepseek_mtp", [("renamed", {f"{ROLLOUT}.speculative": "mtp"}, "")]),
        (f"{DRAFTS}=null", [("ignored", {}, "")]),
        (f"{DRAFTS}='method: ngram'", [("not supported", {}, "the engine's option speculative_config as one text")]),
    ],
)
def test_drafts_of_verl(override, expected):
    """vLLM's own search by name; suffix decoding becomes earlier answers. Would not catch defaults that differ."""
    assert notes(override) == expected


MTP, FACTOR = "+actor_rollout_ref.model.mtp", "actor_rollout_ref.actor.mtp_loss_scaling_factor"
DRAFTED = {f"{ROLLOUT}.speculative": "mtp"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (f"{MTP}.enable=true", [("ignored", {}, "")]),
        (f"{MTP}.enable_rollout=true", [("renamed", {f"{ROLLOUT}.speculative": "mtp"}, "")]),
        (
            f"{MTP}={{enable_train: true, mtp_loss_scaling_factor: 0.3, detach_encoder: true}}",
            [("renamed", {FACTOR: 0.3} | DRAFTED, ""), ("ignored", {}, ""), ("ignored", {}, "")],
        ),
        (f"{MTP}.enable_train=true", [("renamed", {FACTOR: 0.1} | DRAFTED, "")]),
        (
            f"{MTP}={{enable_rollout: true, enable_train: true}}",
            [("renamed", DRAFTED, ""), ("renamed", {FACTOR: 0.1}, "")],
        ),
        (f"{MTP}={{enable_train: false, detach_encoder: false}}", [("ignored", {}, ""), ("ignored", {}, "")]),
        (
            f"{MTP}={{detach_encoder: false, enable_train: true}}",
            [
                ("not supported", {}, "gradients of the MTP layer's loss for the policy"),
                ("renamed", {FACTOR: 0.1} | DRAFTED, ""),
            ],
        ),
        (f"{MTP}.num_speculative_tokens=2", [("renamed", {f"{ROLLOUT}.num_speculative_tokens": 2}, "")]),
    ],
)
def test_mtp_of_verl(override, expected):
    """Its switches become ours, with its factor or its default. Would not catch a default that changes there."""
    assert notes(override) == expected


@pytest.mark.parametrize(
    ("override", "kind", "becomes"),
    [
        (f"{ACTORS}.lora_rank=64", "renamed", {f"{ACTORS}.lora.rank": 64}),
        ("critic.model.lora_alpha=16", "renamed", {"critic.model.lora.alpha": 16}),
        (f"{ACTORS}.lora_adapter_path=adapter", "renamed", {f"{ACTORS}.lora.adapter_path": "adapter"}),
        (f"{ACTORS}.target_modules=all-linear", "ignored", {}),
        (f"{ACTORS}.target_modules=[q_proj]", "renamed", {f"{ACTORS}.lora.target_modules": ["q_proj"]}),
        (f"{ACTORS}.lora.type=lora", "renamed", CANONICAL),
        (f"{ACTORS}.lora.lora_B_init_method=zero", "ignored", {}),
    ],
)
def test_adapters_of_verl(override, kind, becomes):
    """Keys of its Megatron and FSDP engines, by hand. Would not catch a detail that has no row."""
    assert [(found, settings) for found, settings, _ in notes(override)] == [(kind, becomes)]


def test_what_verl_counts_in_samples_and_transfers_is_counted_in_steps():
    """By hand: steps of 2 x 32 prompts, weights every 4 of them, and a tenth of the samples may be older than the last
    transfer: 3 steps old between two, and 1 of the share before. Would not catch another meaning in a newer verl.
    """
    asked = {
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "data.train_batch_size": 0,
        "data.gen_batch_size": 1,
        "rollout.nnodes": 2,
        "rollout.n_gpus_per_node": 8,
        "rollout.total_rollout_steps": 6400,
        "rollout.test_freq": 5,
        "async_training.require_batches": 2,
        "async_training.trigger_parameter_sync_step": 4,
        "async_training.staleness_threshold": 0.1,
    }
    said = {setting.key: setting.value for setting in translate(settings_of(asked), is_key).settings}
    assert said == {
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "data.train_batch_size": 64,
        "trainer.total_training_steps": 100,
        "trainer.test_freq": 20,
        "actor_rollout_ref.rollout.nnodes": 2,
        "actor_rollout_ref.rollout.n_gpus_per_node": 8,
        "async_training.trigger_parameter_sync_step": 4,
        "trainer.rollout_ahead": 4,
        "algorithm.rollout_correction.bypass_mode": True,
    }


def test_neutral_values_belong_to_their_key():
    """1 leaves samples as they are for the repetition penalty alone, 0 for the others. Would not catch null."""
    asked = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "min_p": 0}
    for name, neutral in asked.items():
        for value, kind in ((neutral, "ignored"), (1 - neutral, "not supported")):
            ((found, *_),) = notes(f"actor_rollout_ref.rollout.{name}={value}")
            assert found == kind, (name, value)


def test_one_step_off_is_a_rollout_of_its_own_and_one_step_ahead():
    """By hand. Would not catch a correction that the user has set elsewhere."""
    asked = {"trainer.v1.trainer_mode": "separate_async", "async_training.partial_rollout": False}
    found = translate(settings_of(asked), is_key)
    assert {setting.key: setting.value for setting in found.settings} == {
        "actor_rollout_ref.hybrid_engine": False,
        "async_training.partial_rollout": False,
        "trainer.rollout_ahead": 1,
        "algorithm.rollout_correction.rollout_is": "token",
    }


def test_samples_of_all_ranks_become_samples_of_one():
    """64 over 16 ranks of TP2 PP2, so DP4: 16 each. Would not catch a role with a layout of its own."""
    values = {
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 8,
        f"{MEGATRON}.tensor_model_parallel_size": 2,
        f"{MEGATRON}.pipeline_model_parallel_size": 2,
        "actor_rollout_ref.actor.ppo_micro_batch_size": 64,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size": 128,
    }
    found = {key: value for note in translated(**values).notes for key, value in note.became.items()}
    assert found == {
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 16,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 32,
    }


def test_fsdps_switch_for_recomputing_counts_without_megatrons():
    """Would not catch a script that mixes both engines."""
    key, group = "actor_rollout_ref.model.enable_gradient_checkpointing", f"{MEGATRON}.override_transformer_config"
    assert translated(**{key: True}).notes[0].became[f"{group}.recompute_granularity"] == "full"
    assert translated(**{key: True, f"{MEGATRON}.tensor_model_parallel_size": 2}).of(Kind.RENAMED) == []


def test_hydras_prefixes_and_values():
    """`+`, `++`, `~`, null, None, lists in quotes and one name for a list. Would not catch Hydra's sweeps."""
    texts = ["+trainer.seed=3", "++data.seed=4", "~trainer.seed", 'trainer.logger=\'["console","jsonl"]\'']
    texts += ["trainer.max_ckpt_to_keep=None", "data.train_files=\"['x.parquet', 'y.parquet']\""]
    given_settings = settings_of(BASE) + [setting for text in texts for setting in read_override(text)]
    config = read_settings(given_settings).config
    assert config is not None
    assert (config.trainer.seed, config.data.seed, config.trainer.logger) == (1, 4, ["console", "jsonl"])
    assert config.trainer.max_ckpt_to_keep is None and config.data.train_files == ["x.parquet", "y.parquet"]
    config = read_settings([*settings_of(BASE), *read_override("trainer.logger=console")]).config
    assert config is not None and config.trainer.logger == ["console"]
    final, idle = final_settings([*read_override("a.b=1"), *read_override("~a"), *read_override("~c.d=2")])
    assert final == [] and [setting.written for setting in idle] == ["~c.d"]


@pytest.mark.parametrize(
    ("key", "like"),
    [
        ("trainer.sed", "trainer.seed"),
        ("rollout.n", "actor_rollout_ref.rollout.n"),
        ("data.train_batchsize", "data.train_batch_size"),
        ("trainer.total_steps", "trainer.total_training_steps"),
        (f"{MEGATRON}.tensor_parallel_size", f"{MEGATRON}.tensor_model_parallel_size"),
        ("trainer.worker_count", None),
        ("trainer.epoch_budget", None),
        ("actor_rollout_ref.actor.router_replay_mode", None),
        ("optimizer.magic", None),
    ],
)
def test_a_name_is_offered_only_where_it_is_alike(key, like):
    """One word for another is no slip. Would not catch a slip that makes another word."""
    assert like_name(key, KEYS) == like


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [(1, True, False), (1, 1.0, True), ("None", None, True), (["b", "a"], ["a", "b"], True), (0, False, False)],
)
def test_values_that_say_the_same(left, right, same):
    """Would not catch numbers within texts."""
    assert alike(left, right) is same
