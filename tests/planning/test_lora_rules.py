"""Adapters: what is refused before anything starts, word for word, and what is advised."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from fault import base_config, good_case
from model_folders import problems
from safetensors.numpy import load_file, save, save_file
from test_model_folder import LATENT

from megatron_rl.config.roles import CRITIC, roles_of
from megatron_rl.planning.lora_rules import lora_notes
from megatron_rl.planning.merge_choice import with_merge_chosen

LORA = "actor_rollout_ref.model.lora"
MEGATRON = "actor_rollout_ref.actor.megatron"
ALIASES = (
    "all-linear, down_proj, gate_proj, k_proj, linear_fc1, linear_fc1_gate, linear_fc1_up, linear_fc2, linear_k, "
    "linear_proj, linear_q, linear_qkv, linear_v, o_proj, q_proj, up_proj, v_proj"
)


@pytest.fixture
def case(tmp_path):
    """Six ranks, TP2 x PP3, six layers; q is [384, 384], k is [192, 384], gate is [192, 384]."""
    (tmp_path / "base").mkdir()
    made = good_case(tmp_path, base_config(tmp_path / "base"), experts=False)
    made.set({f"{LORA}.rank": 16})
    return made


def in_words(case) -> list[str]:
    """The violations, with the folder's name shortened."""
    return [text.replace(str(case.folder), "FOLDER") for text in problems(case.config)]


def test_adapters_are_allowed(case):
    """On every linear, and with wildcards on one layer of each stage. Would not catch a rule that is missing."""
    assert in_words(case) == []
    case.set({f"{LORA}.target_modules": ["*.layers.1.*.linear_qkv", "*.layers.2.*.q_proj", "*.layers.4.*.linear_fc2"]})
    assert in_words(case) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"alpha": 0.0},
            f"{LORA}.alpha=0 must be > 0 with {LORA}.rank=16: adapters would add nothing, and have no gradients; "
            "try: 32",
        ),
        ({"rank": 513}, f"{LORA}.rank=513 must be at most 512; try: 512"),
        (
            {"rank": 193},
            f"{LORA}.rank=193 must be <= 192, the smaller side of model.layers.0.self_attn.k_proj [192, 384] of "
            "FOLDER/model; try: 192",
        ),
        (
            {"target_modules": ["q_poj", "linear_fc2"]},
            f"{LORA}.target_modules=['q_poj', 'linear_fc2'] names no linear of FOLDER/model with q_poj; it has "
            f"{ALIASES}; did you mean: ['q_proj', 'linear_fc2']",
        ),
        (
            {"exclude_modules": ["*.layers.9.*"]},
            f"{LORA}.exclude_modules=['*.layers.9.*'] names no linear of FOLDER/model with *.layers.9.*; it has "
            f"{ALIASES}; did you mean: ['NEAREST']",
        ),
        (
            {"exclude_modules": ["all-linear"]},
            f"{LORA}.target_modules=['linear_qkv', 'linear_proj', 'linear_fc1', 'linear_fc2'] and "
            f"{LORA}.exclude_modules=['all-linear'] leave no linear of FOLDER/model with an adapter; "
            f"try: {LORA}.exclude_modules=[]",
        ),
        (
            {"target_modules": ["*.layers.2.*"]},
            f"{LORA}.target_modules=['*.layers.2.*'] and {LORA}.exclude_modules=[] and "
            f"{MEGATRON}.pipeline_model_parallel_size=3 leave pipeline stage 0, 2 without "
            "an adapter: each must train something; "
            f"try: {LORA}.target_modules=['linear_qkv', 'linear_proj', 'linear_fc1', 'linear_fc2']",
        ),
    ],
)
def test_single_faults(case, changes, expected):
    """Each with its values, its rule and a valid choice. Would not catch faults that hide each other."""
    case.set({f"{LORA}.{name}": value for name, value in changes.items()})
    (found,) = in_words(case)
    if "NEAREST" in expected:  # of several equally likely names
        assert found.startswith(expected.partition("['NEAREST']")[0])
    else:
        assert found == expected


def test_what_merging_goes_with(case):
    """Generation of the actor, whose base stays. Would not catch another role that generates."""
    case.set({f"{LORA}.merge": True})
    assert in_words(case) == []
    critic = "critic.model.lora"
    case.set({f"{critic}.rank": 16, f"{critic}.merge": True})
    assert f"{critic}.merge=true is for generation, and critic has none; try: false" in in_words(case)


def test_routed_experts(tmp_path):
    """Merged, or in a run that does not generate, or excluded; gate and up together; on CPUs alone. Each nearest choice
    is valid. Would not catch shared experts, which are no routed ones.
    """
    (tmp_path / "base").mkdir()
    case = good_case(tmp_path, base_config(tmp_path / "base"), experts=True)
    case.set({f"{LORA}.rank": 16})
    targets = f"{LORA}.target_modules=['linear_qkv', 'linear_proj', 'linear_fc1', 'linear_fc2']"
    excluded = f"{LORA}.exclude_modules=['*.experts.*']"
    (unmerged,) = in_words(case)
    assert unmerged.startswith(f"{targets} and {LORA}.merge=false do not go together: they reach routed experts")
    assert f"; {excluded} gives them none; try: {LORA}.merge=true" in unmerged
    case.set({f"{LORA}.exclude_modules": ["*.experts.*"]})
    assert in_words(case) == []
    case.set({f"{LORA}.exclude_modules": [], f"{LORA}.merge": True})
    assert in_words(case) == []
    case.set({f"{LORA}.target_modules": ["linear_qkv", "gate_proj"]})
    (half,) = in_words(case)
    assert half.endswith(
        f"and not its other half: gate and up are one parameter in PEFT; try: {targets} {LORA}.exclude_modules=[]"
    )
    case.set({f"{LORA}.target_modules": ["*.experts.*"], "trainer.device": "cuda"})
    rule = f"do not go together: no GPU has run it; try: {excluded} {targets}; or set trainer.allow_unproven=true"
    assert f"{LORA}.target_modules=['*.experts.*'] and trainer.device=cuda {rule}" in in_words(case)


def test_adapters_in_float32_on_gpus(case):
    """vLLM would stop in the first request. Merged ones, 16 bits and CPUs are allowed, and merging is chosen where it
    is left open. Would not catch another dtype that its kernels refuse.
    """
    case.set({"trainer.device": "cuda", f"{MEGATRON}.dtype": "float32"})
    why = "vLLM's kernels of adapters on GPUs have no float32"
    given = f"{LORA}.rank=16 and {LORA}.merge=false and {MEGATRON}.dtype=float32 and trainer.device=cuda"
    assert f"{given} do not go together: {why}; try: {LORA}.merge=true" in in_words(case)
    kernels = Path(find_spec("vllm").origin).with_name("lora") / "ops/triton_ops/lora_shrink_op.py"
    assert "assert inputs.dtype in [torch.float16, torch.bfloat16]" in kernels.read_text()
    config, lines = with_merge_chosen(case.config, [f"{LORA}.rank"])
    assert config.actor_rollout_ref.model.lora.merge and lines == [f"{LORA}.merge=true is chosen: {why}"]
    for changes in ({f"{LORA}.merge": True}, {f"{LORA}.merge": False, f"{MEGATRON}.dtype": "bfloat16"}):
        case.set(changes)
        assert not [text for text in in_words(case) if why in text]


def test_merging_is_chosen_where_it_is_left_open(tmp_path, case):
    """Of latent attention, with a line that says so; an explicit false is refused with the way out, and a model that
    needs none is left alone. Would not catch a model that vLLM refuses for another reason.
    """
    config, lines = with_merge_chosen(case.config, ())
    assert not config.actor_rollout_ref.model.lora.merge and lines == []
    case.model(**LATENT)
    (found,) = [text for text in in_words(case) if LORA in text]
    why = (
        "vLLM has no adapter for model.layers.0.self_attn.kv_b_proj, with parts of whose weight it multiplies by "
        "itself, so that generation reads this model's merged alone"
    )
    assert found == f"{LORA}.rank=16 and {LORA}.merge=false do not go together: {why}; try: {LORA}.merge=true"
    assert with_merge_chosen(case.config, [f"{LORA}.merge"])[1] == []
    config, lines = with_merge_chosen(case.config, [f"{LORA}.rank"])
    assert config.actor_rollout_ref.model.lora.merge and lines == [f"{LORA}.merge=true is chosen: {why}"]
    assert [text for text in in_words(case) if LORA in text] == []


def test_a_critic_has_the_same_rules(case):
    """Under its own key; its head trains on the last stage. Would not catch a rule of actors alone."""
    case.set({"critic.model.lora.rank": 8, "critic.model.lora.alpha": 0.0})
    case.set({"critic.model.lora.target_modules": ["*.layers.0.*", "*.layers.3.*"]})
    assert CRITIC in {role.name for role in roles_of(case.config)}
    assert in_words(case) == [
        "critic.model.lora.alpha=0 must be > 0 with critic.model.lora.rank=8: adapters would add nothing, and have "
        "no gradients; try: 32"
    ]


def folder_of(case, **settings) -> Path:
    """A whole adapter of all o_proj, and a run that starts from it. settings: of adapter_config.json."""
    folder = case.folder / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 16, "lora_alpha": 32} | settings))
    shapes = {"lora_A": (16, 384), "lora_B": (384, 16)}
    names = [(f"base_model.model.model.layers.{layer}.self_attn.o_proj", kind) for layer in range(6) for kind in shapes]
    content = {f"{name}.{kind}.weight": np.zeros(shapes[kind], np.float16) for name, kind in names}
    save_file(content, folder / "adapter_model.safetensors")
    case.set({f"{LORA}.adapter_path": str(folder), f"{LORA}.target_modules": ["o_proj"]})
    return folder


def test_a_peft_folder_decides_rank_and_alpha(case):
    """Equal ones pass, and with rank=0 the folder's is offered. Would not catch other settings of a folder."""
    folder_of(case, lora_alpha=8)
    assert in_words(case) == [
        f"{LORA}.alpha=32 must be 8, the lora_alpha of {LORA}.adapter_path=FOLDER/adapter; try: 8"
    ]
    case.set({f"{LORA}.alpha": 8.0})
    assert in_words(case) == []
    case.set({f"{LORA}.rank": 0})
    assert in_words(case) == [f"{LORA}.rank=0 must be 16, the r of {LORA}.adapter_path=FOLDER/adapter; try: 16"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"r": "many"}, "r='many' must be a whole number >= 1"),
        ({"r": math.inf}, "r=inf must be a whole number >= 1"),
        ({"lora_alpha": 10**400}, "a number has 401 digits, and at most 300 are read"),
        ({"x": [[[]]] * 2, "use_dora": True}, "use_dora=True must be False: plain LoRA is read"),
        ({"r": 1024}, "of a rank that generation has; its r is 1024, and 512 is the most"),
    ],
)
def test_folders_that_are_none(case, settings, expected):
    """Half of one as well. Would not catch a setting that a later PEFT adds."""
    folder = folder_of(case, **settings)
    (found,) = in_words(case)
    assert expected in found and found.endswith("try: null")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_config.json").unlink()
    assert in_words(case) == [
        f"{LORA}.adapter_path=FOLDER/adapter must be a PEFT folder with adapter_config.json and "
        "adapter_model.safetensors; it is missing adapter_config.json and adapter_model.safetensors; try: null"
    ]


O_PROJ = "base_model.model.model.layers.0.self_attn.o_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda _: b"", "adapter_model.safetensors has 0 bytes, which hold no header of safetensors"),
        (lambda all: save(all)[:-1], "it was cut off"),
        (
            lambda all: save(all | {O_PROJ.format("A"): np.zeros((16, 384), np.int8)}),
            f"{O_PROJ.format('A')} in adapter_model.safetensors is of type I8: weights must be of type F64, F32, F16,",
        ),
        (
            lambda all: save(all | {O_PROJ.format("A"): np.zeros((16, 385), np.float16)}),
            f"{O_PROJ.format('A')} in FOLDER/adapter is [16, 385], the model implies [16, 384]",
        ),
        (
            lambda all: save({name: tensor for name, tensor in all.items() if name != O_PROJ.format("B")}),
            f"other adapters than target_modules asks for: it is missing ['{O_PROJ.format('B')}'], and has none in "
            "addition",
        ),
    ],
    ids=["empty", "torn", "integers", "shape", "half"],
)
def test_what_a_rank_would_refuse(case, change, expected) -> None:
    """Before one starts, from the header of the weights. Would not catch an element that is NaN, which ranks find."""
    file = folder_of(case) / "adapter_model.safetensors"
    assert in_words(case) == []
    file.write_bytes(change(load_file(file)))
    (found,) = in_words(case)
    assert expected in found


def test_numbers_that_hardly_learn_are_named(case):
    """One sentence for each. Would not catch a rate that is too high."""
    case.set({f"{LORA}.rank": 4, "actor_rollout_ref.actor.optim.lr": 1e-6})
    assert lora_notes(case.config) == [
        f"actor_rollout_ref.actor.optim.lr=1e-06 is low for adapters ({LORA}.rank=4): about ten times that of full "
        "training works, 1e-05 or more",
        f"{LORA}.rank=4 is small: 8 and more learn as well as full training",
    ]
    case.set({f"{LORA}.rank": 0})
    assert lora_notes(case.config) == []
