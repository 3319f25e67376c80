"""Every rule that is checked before a process starts: broken one at a time, and all at once."""

from __future__ import annotations

import time
from dataclasses import replace
from operator import attrgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_folders import EXPERTS, problems, set_experts, write_model, write_prompts

from megatron_rl.checkpoint.manifest import FORMAT, Manifest
from megatron_rl.config.keys import put
from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.config.problems import raise_problems
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError
from megatron_rl.planning.folder_checks import ModelSizes
from megatron_rl.planning.layout_rules import ExpertLayouts, Layouts
from megatron_rl.planning.preflight import preflight
from megatron_rl.planning.stage_rules import spreads, stage_problems

MEGATRON = "actor_rollout_ref.actor.megatron"
TP, PP = f"{MEGATRON}.tensor_model_parallel_size", f"{MEGATRON}.pipeline_model_parallel_size"
EP, ETP = f"{MEGATRON}.expert_model_parallel_size", f"{MEGATRON}.expert_tensor_parallel_size"


def set_tp(config: RunConfig, tp: int) -> None:
    shared = config.actor_rollout_ref
    shared.actor.megatron.tensor_model_parallel_size = tp
    config.critic.megatron.tensor_model_parallel_size = shared.ref.megatron.tensor_model_parallel_size = tp
    shared.rollout.tensor_model_parallel_size = tp


def set_pp(config: RunConfig, pp: int) -> None:
    config.actor_rollout_ref.actor.megatron.pipeline_model_parallel_size = pp
    config.critic.megatron.pipeline_model_parallel_size = pp
    config.actor_rollout_ref.ref.megatron.pipeline_model_parallel_size = pp


@pytest.mark.parametrize("key", ["trainer.default_local_dir", "trainer.rollout_data_dir", "data.bad_rows_file"])
def test_nothing_is_written_into_a_checkpoint(config, tmp_path, key):
    """A run in another's checkpoint would be no part of it. Would not catch a checkpoint that is still unfinished."""
    folder = tmp_path / "run/global_step_2"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(Manifest(FORMAT, 2, {}, {}).to_json())
    put(config, key, f"{folder}/actor/new")
    (problem,) = problems(config)
    assert problem == f"{key}={folder}/actor/new must not be inside of a checkpoint, {folder}; try: {folder}-new"


def test_a_good_run_has_no_violations(config):
    """Would not catch a missing rule."""
    assert problems(config) == []


def test_a_rule_of_validation_needs_ground_truths_there_alone(config, tmp_path):
    """Training rows without them are refused until the rule is asked in validation only; held-out ones still are.

    Would not catch a row whose ground truth is null, which is found when the file is read.
    """
    train, val = (write_prompts(tmp_path / f"{name}.jsonl", reward_model=None) for name in ("train", "val"))
    head = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    config.reward_model.enable, config.reward_model.model.path = True, write_model(tmp_path / "rm", **head)
    config.data.train_files = train
    assert any(f"column with the expected answer, or a field of one; {train} has" in one for one in problems(config))
    config.custom_reward_function.validation_only = True
    assert problems(config) == []
    config.data.val_files = val
    assert any(f"column with the expected answer, or a field of one; {val} has" in one for one in problems(config))


def test_tp_times_pp_must_divide_the_ranks(config):
    """tp(2) * pp(2) on 6 ranks. Would not catch a suggestion that fits but is far away."""
    set_pp(config, 2)
    (problem,) = problems(config)
    assert problem == (
        "tp(2) * pp(2) must divide the 6 ranks (trainer.nnodes=1 * trainer.n_gpus_per_node=6); try: "
        f"{MEGATRON}.pipeline_model_parallel_size=3; or see what fits: megatron-rl map --config FILE --gpus 6"
    )


def test_tp_must_divide_everything_it_cuts(config):
    """TP4: 12 heads and 192 columns are fine, 6 KV heads are not. Would not catch a new cut."""
    config.trainer.n_gpus_per_node = 12
    set_tp(config, 4)
    (problem,) = problems(config)
    path = config.actor_rollout_ref.model.path
    assert problem == f"tp(4) must divide num_key_value_heads(6) of {path}; try: {TP}=2"


def test_vocabulary_is_padded_for_any_tp(config):
    """TP3 and 100 tokens: 192 rows to train, while vLLM's 128 fit no 3 ranks. Would not catch rows padded otherwise."""
    set_tp(config, 3)
    config.trainer.n_gpus_per_node = 9
    (problem,) = problems(config)
    assert problem.startswith(
        "actor_rollout_ref.rollout.tensor_model_parallel_size=3 must divide padded_vocab_size(128)"
    )
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 1
    assert problems(config) == []


def test_pp_must_divide_the_layers(config):
    """PP4 and 6 layers on 8 ranks, which 3 stages would not divide. Would not catch uneven stages."""
    config.trainer.n_gpus_per_node = 8
    set_pp(config, 4)
    (problem,) = problems(config)
    path = config.actor_rollout_ref.model.path
    assert problem == f"pp(4) must divide num_hidden_layers(6) ({path}); try: {PP}=2"


VPP = "virtual_pipeline_model_parallel_size"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


def set_stages(config: RunConfig, pp: int, **shares: int) -> None:
    """PP and further keys for all roles, on 2 * pp ranks."""
    config.trainer.n_gpus_per_node = 2 * pp
    for role in (config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic):
        role.megatron = MegatronConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=pp, **shares)


@pytest.mark.parametrize(
    ("pp", "shares"),
    [
        (3, {VPP: 2}),
        (2, {VPP: 3}),
        (1, {VPP: 1}),
        (4, {FIRST: 3}),
        (4, {LAST: 3}),
        (5, {LAST: 2}),
        (2, {FIRST: 1, LAST: 5}),
    ],
)
def test_stages_that_share_six_layers(config, pp, shares):
    """Would not catch a stage plan that Megatron refuses; its own tests do."""
    set_stages(config, pp, **shares)
    assert problems(config) == []


@pytest.mark.parametrize(
    ("pp", "shares", "rule", "nearest"),
    [
        (2, {VPP: 2}, "pp(2) * vpp(2) must divide num_hidden_layers(6)", f"{MEGATRON}.{VPP}=1"),
        (3, {VPP: 4}, "pp(3) * vpp(4) must divide num_hidden_layers(6)", f"{MEGATRON}.{VPP}=2"),
        (4, {VPP: 3}, "pp(4) * vpp(3) must divide num_hidden_layers(6)", f"{PP}=2"),
        (1, {VPP: 2}, "vpp(2) needs pp(1) > 1", f"{MEGATRON}.{VPP}=1"),
        (2, {VPP: 3, FIRST: 2}, "first(2) and last(None) layers need pp(2) > 1 and vpp(3) = 1", f"{MEGATRON}.{VPP}=1"),
        (
            1,
            {LAST: 6},
            "first(None) and last(6) layers need pp(1) > 1 and vpp(1) = 1",
            f"{PP}=1 {MEGATRON}.{LAST}=null",
        ),
        (2, {FIRST: 2, LAST: 3}, "pp(2) stages must add up to num_hidden_layers(6)", f"{MEGATRON}.{LAST}=4"),
        (
            3,
            {FIRST: 1},
            "must leave equal shares of num_hidden_layers(6) to the other 2 stages",
            f"{MEGATRON}.{FIRST}=2",
        ),
        (
            4,
            {FIRST: 5, LAST: 2},
            "must leave equal shares of num_hidden_layers(6) to the other 2 stages",
            f"{MEGATRON}.{FIRST}=2",
        ),
    ],
)
def test_stages_that_do_not_share_six_layers(config, pp, shares, rule, nearest):
    """One number is changed where that is enough. Would not catch a nearer choice that was passed over."""
    set_stages(config, pp, **shares)
    (problem,) = problems(config)
    assert rule in problem and f"({config.actor_rollout_ref.model.path}); try: {nearest}" in problem


def test_open_stage_keys_must_be_at_least_one(config):
    """Each is refused once, and no other rule divides by it. Would not catch a wrong upper end."""
    set_stages(config, 3, **{VPP: 0})
    named = f"{MEGATRON}.{VPP}=0 and critic.megatron.{VPP}=0"
    assert problems(config) == [f"{named} must be >= 1; try: {MEGATRON}.{VPP}=null critic.megatron.{VPP}=null"]


@pytest.mark.parametrize(("ep", "etp"), [(1, None), (2, None), (4, 1), (2, 2), (1, 4), (1, 1)])
def test_expert_layouts_that_fit(moe_config, ep, etp):
    """Expert and expert tensor parallelism alone and together. Would not catch what only the engine refuses."""
    set_experts(moe_config, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    assert problems(moe_config) == []


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            {"expert_model_parallel_size": 4},
            f"etp(2) * ep(4) must divide the 4 ranks of a stage (12 ranks / pp(3)); try: {EP}=2",
        ),
        (
            {"expert_tensor_parallel_size": 8},
            f"etp(8) * ep(1) must divide the 4 ranks of a stage (12 ranks / pp(3)); try: {EP}=1 {ETP}=4",
        ),
        (
            {"sequence_parallel": False},
            "actor_rollout_ref.actor.megatron.sequence_parallel=false must be true: training experts with tp(2) > 1 "
            "needs it; try: true",
        ),
        (
            {"expert_tensor_parallel_size": 0},
            f"{ETP}=0 and critic.megatron.expert_tensor_parallel_size=0 must be null (as TP) or >= 1; "
            f"try: {ETP}=null critic.megatron.expert_tensor_parallel_size=null",
        ),
    ],
)
def test_expert_layouts_that_do_not_fit(moe_config, sizes, expected):
    """The message, whatever else is wrong. Would not catch a suggestion that breaks a rule of another room."""
    set_experts(moe_config, **sizes)
    assert expected in problems(moe_config)


def test_experts_must_come_out_even(moe_config, tmp_path):
    """EP4 of 6 experts, and ETP4 of 18 columns, on 4 ranks a stage. Would not catch a critic's experts."""
    path = write_model(tmp_path / "model", **EXPERTS | {"num_experts": 6, "moe_intermediate_size": 18})
    set_experts(moe_config, expert_model_parallel_size=4, expert_tensor_parallel_size=1)
    assert problems(moe_config) == [f"{EP}=4 must divide num_experts(6) of {path}; try: 2"]
    set_experts(moe_config, expert_model_parallel_size=1, expert_tensor_parallel_size=4)
    assert problems(moe_config) == [f"etp(4) must divide moe_intermediate_size(18) of {path}; try: {ETP}=2"]


def test_expert_parallelism_needs_experts(config):
    """EP2 and a dense model. Would not catch a dense critic beside a policy with experts, which is fine."""
    config.trainer.n_gpus_per_node = 12
    set_experts(config, expert_model_parallel_size=2)
    path = config.actor_rollout_ref.model.path
    assert problems(config) == [f"{EP}=2 needs a model with experts, and {path} has none; try: 1"]


def test_roles_share_one_grid(config):
    """The critic's and the reference's sizes. Would not catch a size that is shared in a way not listed here."""
    config.actor_rollout_ref.ref.megatron.pipeline_model_parallel_size = 1
    config.critic.megatron.tensor_model_parallel_size = 1
    config.critic.megatron.dtype = "bfloat16"
    found = "\n".join(problems(config))
    assert "ref.megatron.pipeline_model_parallel_size=1 must equal" in found
    assert "critic.megatron.tensor_model_parallel_size=1 must equal" in found
    assert "critic.megatron.dtype=bfloat16 must equal" in found


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, []),
        (6, ["must be one of 1, 2, 3, 4, 8 on trainer.device=cpu", "must divide padded_vocab_size(128)"]),
        (3, ["must divide padded_vocab_size(128)"]),
        (4, ["must divide the 6 ranks; try: 2", "divide or be a multiple of num_key_value_heads(6)"]),
    ],
)
def test_rollout_tp_fits_ranks_and_model(config, size, expected):
    """12 heads, 6 key/value heads, 192 columns, 128 rows. Would not catch a size that only vLLM refuses."""
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = size
    found = problems(config)
    assert len(found) == len(expected)
    for problem, rule in zip(found, expected, strict=True):
        assert problem.startswith(f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} must")
        assert rule in problem


def test_key_value_heads_may_be_repeated(config, tmp_path):
    """3 heads for 6 ranks: each is held twice. Would not catch a model whose vocabulary does not divide."""
    write_model(tmp_path / "model", num_key_value_heads=2, vocab_size=192 * 2)
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 6
    config.trainer.device = "cuda"  # on cpu six ranks cannot add up
    assert problems(config) == []


@pytest.mark.parametrize(
    ("device", "size", "rule"),
    [
        ("cpu", 20, "must be one of 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512: vLLM has no"),
        ("cpu", 512, ""),
        ("cuda", 20, "must be a multiple of 8 and <= 256: vLLM has no"),
        ("cuda", 264, "must be a multiple of 8 and <= 256: vLLM has no"),
        ("cuda", 72, ""),
    ],
)
def test_heads_that_the_engine_has_kernels_for(config, tmp_path, device, size, rule):
    """A critic may have any: it does not generate. Would not catch another backend that vLLM chooses on CUDA."""
    path = write_model(tmp_path / "model", head_dim=size)
    config.critic.model.path = write_model(tmp_path / "critic", head_dim=20)
    config.trainer.device = device
    found = problems(config)
    assert len(found) == bool(rule) and all(one.startswith(f"head_dim({size}) of {path} {rule}") for one in found)


def test_layouts_of_very_many_ranks_are_looked_through_at_once(config):
    """A slip of the finger. Would not catch a slow rule that needs a model of absurd sizes."""
    started = time.monotonic()
    config.trainer.nnodes, config.trainer.n_gpus_per_node = 33_333, 3
    assert any("must divide the 99999 ranks" in problem for problem in problems(config))
    config.trainer.nnodes, config.trainer.n_gpus_per_node = 65_536, 1000
    assert problems(config) == [
        "trainer.nnodes=65536 and trainer.n_gpus_per_node=1000 are 65536000 ranks of pool global_pool, and must be at "
        "most 100000; try: trainer.nnodes=100 trainer.n_gpus_per_node=1000"
    ]
    assert time.monotonic() - started < 2
    config.trainer.nnodes = 10**30
    assert any(
        "trainer.nnodes=1000000000000000000000000000000 must be >= 1 and <= 100000" in problem
        for problem in problems(config)
    )


def test_batches_of_very_many_prompts_are_refused_alone(config):
    """Before a rule counts with them. Would not catch a plan that does; its tables are made from sizes alone."""
    config.data.train_batch_size = config.data.gen_batch_size = 10**12
    config.actor_rollout_ref.model.path = "/nowhere"
    assert problems(config) == [
        "data.train_batch_size=1000000000000 and data.gen_batch_size=1000000000000 must be at most 1000000; try: "
        "data.train_batch_size=1000000 data.gen_batch_size=1000000"
    ]


@pytest.mark.parametrize(
    ("group", "name", "nearest"),
    [
        ("trainer", "default_local_dir", "; try: outputs/megatron_rl/run"),
        ("trainer", "rollout_data_dir", "; try: null"),
        ("custom_reward_function", "path", "; try: null"),
        ("actor_rollout_ref.model", "path", ""),
    ],
)
def test_an_empty_path_is_none(config, group, name, nearest):
    """It would be the folder that the command is in. Would not catch one of a list, which the rule of files refuses."""
    setattr(attrgetter(group)(config), name, "")
    (problem,) = [one for one in problems(config) if one.startswith(f"{group}.{name}=")]
    assert problem == f"{group}.{name}= must be a path, and is empty{nearest}"


def test_vocabulary_padding_and_experts_of_generation(config, tmp_path):
    """TP2 with 100 rows padded to 140, and experts of 15 columns. Would not catch vLLM's own padding of experts."""
    shared = config.actor_rollout_ref
    for role in (shared.actor, shared.ref, config.critic):
        role.megatron.make_vocab_size_divisible_by = 35
    assert problems(config) == []
    for role in (shared.actor, shared.ref, config.critic):
        role.megatron.make_vocab_size_divisible_by = 64
        role.megatron.expert_tensor_parallel_size, role.megatron.sequence_parallel = 1, True
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 15, "norm_topk_prob": True}
    write_model(tmp_path / "model", architectures=["Qwen3MoeForCausalLM"], **experts)
    (problem,) = problems(config)
    assert "rollout.tensor_model_parallel_size=2 must divide moe_intermediate_size(15)" in problem


def test_what_cannot_leave_while_generating(config):
    """The actor's parameters, and training shards wider than rollout's. Would not catch too little host memory."""
    shared = config.actor_rollout_ref
    shared.actor.megatron.param_offload = True
    shared.rollout.drop_train_weights = True
    shared.rollout.tensor_model_parallel_size = 6
    found = "\n".join(problems(config))
    assert "generation reads the actor's parameters" in found
    assert (
        "must divide training tp(2), as drop_train_weights=true needs training shards inside of its own; try: 2"
        in found
    )


def test_batch_and_length_rules(config):
    """Mini-batch 32 of 71 is fine, 16 + 49 of 64 positions are not. Would not catch a batch larger than the dataset."""
    config.data.train_batch_size = config.data.gen_batch_size = 71
    config.data.max_response_length = 49
    config.actor_rollout_ref.rollout.max_num_batched_tokens = 100
    tokens, length = problems(config)
    assert tokens.endswith("max_num_batched_tokens=100 must be >= max_num_seqs=256; try: 256")
    assert "must be <= max_position_embeddings(64)" in length
    assert "try: data.max_response_length=48; " in length and "override_config" in length


def test_absent_files_are_named_with_a_neighbour(config, tmp_path):
    """Would not catch a file that is there and is not what it says."""
    config.data.train_files = str(tmp_path / "trane.parquet")
    config.custom_reward_function.path = str(tmp_path / "nowhere" / "reward.py")
    config.actor_rollout_ref.model.path = config.critic.model.path = str(tmp_path / "modle")
    train, reward, model = problems(config)
    assert train.startswith("data.train_files=") and train.endswith(f"did you mean: {tmp_path / 'train.parquet'}")
    assert reward.endswith(f"{tmp_path / 'nowhere'} holds none")
    assert model.endswith(f"did you mean: {tmp_path / 'model'}")


def test_every_prompt_file_of_a_list_is_sampled_stages(config, tmp_path):
    """A missing one, and one whose name says another format. Would not catch the same file given twice."""
    write_prompts(tmp_path / "more.jsonl")
    (tmp_path / "table.csv").touch()
    more, table, typo = (str(tmp_path / name) for name in ("more.jsonl", "table.csv", "tests.parquet"))
    config.data.train_files = [config.data.train_files, more, table]
    config.data.val_files = [typo]
    wrong, missing = problems(config)
    kind = "must be a .parquet or .jsonl file"
    assert wrong == f"data.train_files={table} {kind}, by its name; rename it to table.parquet"
    assert missing == f"data.val_files={typo} {kind}, and it does not exist; did you mean: {tmp_path / 'test.parquet'}"


def test_folders_of_sample_tables_must_not_be_files(config, tmp_path):
    """Would not catch a folder that may not be written."""
    file = tmp_path / "reward.py"
    config.trainer.validation_data_dir = str(file)
    (problem,) = problems(config)
    assert problem == f"trainer.validation_data_dir={file} must be a folder, and it is a file; try: {file}.run"


def test_built_in_rewards_need_no_file(config):
    """Would not catch a data source that they do not know: rows are read later."""
    config.custom_reward_function.path = None
    assert problems(config) == []


def test_all_violations_come_in_one_numbered_error(config):
    """Sizes below 1 break no other rule by dividing by zero. Would not catch a violation listed twice."""
    config.trainer.nnodes = 0
    set_tp(config, 0)
    config.data.train_batch_size = config.data.gen_batch_size = 0
    config.trainer.device = "tpu"
    with pytest.raises(ConfigError) as error:
        raise_problems("this run cannot start", preflight(config))
    lines = str(error.value).splitlines()
    assert lines[0] == f"this run cannot start: {len(lines) - 1} problems"
    assert [line.split(".")[0].strip() for line in lines[1:]] == [str(n) for n in range(1, len(lines))]
    keys = (
        "data.train_batch_size=0",
        "actor_rollout_ref.actor.megatron.tensor_",
        "trainer.device=tpu",
        "trainer.nnodes=0",
    )
    assert all(f"{number}. {key}" in line for (number, key), line in zip(enumerate(keys, 1), lines[1:], strict=True))


@given(
    tp=st.integers(1, 16),
    pp=st.integers(1, 16),
    world=st.integers(1, 64),
    heads=st.sampled_from([1, 2, 4, 6, 12, 28, 40]),
    layers=st.integers(1, 48),
    cp=st.sampled_from([1, 2, 3, 8]),
    shares=st.fixed_dictionaries({}, optional=dict.fromkeys((VPP, FIRST, LAST), st.integers(1, 4))),
)
def test_suggested_layouts_are_valid(tp, pp, world, heads, layers, cp, shares):
    """A suggestion keeps every rule, the shares of layers where one does. Would not catch a nearer one passed over."""
    sizes = ModelSizes("m", heads, heads, 64 * heads, 128, layers, 64, 100)
    megatron = MegatronConfig(pipeline_model_parallel_size=pp, **shares)
    layouts = Layouts(world, [sizes], megatron)
    new_tp, new_pp, new_cp = layouts.nearest(tp, pp, cp)
    assert world % (new_tp * new_pp * new_cp) == 0 and (cp > 1 or new_cp == 1)
    keeps_shares = spreads([sizes], replace(megatron, pipeline_model_parallel_size=new_pp))
    assert keeps_shares or (shares and layers % new_pp == 0)
    assert all(size % new_tp == 0 for size in sizes.tp_divides.values())
    if (tp, pp) in [(t, p) for t in layouts.tp_sizes for p in layouts.pp_sizes if world % (t * p * cp) == 0]:
        assert (new_tp, new_pp, new_cp) == (tp, pp, cp)


@given(
    stage=st.integers(1, 64),
    ep=st.integers(1, 64),
    etp=st.integers(1, 64),
    experts=st.sampled_from([1, 6, 8, 60, 128]),
    columns=st.sampled_from([1, 24, 768]),
)
def test_suggested_expert_layouts_are_valid(stage, ep, etp, experts, columns):
    """A suggestion keeps every rule. Would not catch a nearer one that was passed over."""
    sizes = ModelSizes("m", 1, 1, 64, 128, 1, 64, 100, num_experts=experts, moe_intermediate_size=columns)
    new_ep, new_etp = ExpertLayouts(stage, [sizes]).nearest(ep, etp)
    assert stage % (new_ep * new_etp) == 0 and experts % new_ep == 0 and columns % new_etp == 0


@given(
    pp=st.integers(1, 8),
    world=st.integers(1, 16),
    layers=st.lists(st.integers(1, 24), min_size=1, max_size=2),
    shares=st.fixed_dictionaries({}, optional=dict.fromkeys((VPP, FIRST, LAST), st.integers(1, 6))),
)
def test_suggested_stages_are_valid(pp, world, layers, shares):
    """What the message names, put into the configuration, breaks no rule. Would not catch a suggestion far away."""
    models = [ModelSizes(f"m{number}", 1, 1, 64, 128, number, 64, 100) for number in layers]
    megatron = MegatronConfig(pipeline_model_parallel_size=pp, **shares)
    found = list(stage_problems(models, megatron, world))
    assert bool(found) == (not spreads(models, megatron))
    for problem in found:
        changes = {key.removeprefix(f"{MEGATRON}."): value for key, value in problem.nearest.items()}
        assert spreads(models, replace(megatron, **changes)), problem
