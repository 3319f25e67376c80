"""Faults of teachers, for the catalogue: their names, folders and routing, and what goes with a loss."""

from __future__ import annotations

import json
from random import Random

from fault import GPUS, PP, TP, Case, Said, fault
from model_folders import write_model

from megatron_rl.config.keys import LEAVES
from megatron_rl.config.load import load_config

TEACHERS, LOSS = "distillation.teacher_models", "distillation.distillation_loss"
TAUGHT = " ".join(
    ["placement layout critic columns model length tokens", *(key for key in LEAVES if key.startswith("distillation"))]
)
"""Areas of the keys that teachers follow, and of all of `distillation`."""
MODE, GRADIENT = f"{LOSS}.loss_mode", f"{LOSS}.use_policy_gradient"
WHOLE = (f"{MODE}=forward_kl", f"{GRADIENT}=false")
SELF = ("t.model_path=self", "t.prompt_key=demonstration")


def put_teachers(case: Case, *given: str) -> None:
    """Keys of `distillation`, as from a file; of teachers without what all begin with. TEACHER: a folder."""
    path = write_model(case.folder / "teacher", hidden_size=192, num_attention_heads=6)
    file = case.folder / "taught.yaml"
    file.write_text("data: {train_files: a, val_files: b}\nactor_rollout_ref: {model: {path: m}}\n")
    base = ["trainer.device=cpu", f"{TP}=2", f"{PP}=3", f"{GPUS}=6"]
    base += ["data.max_prompt_length=16", "data.max_response_length=48", "distillation.enabled=true"]
    named = [text if text.startswith("distillation.") else f"{TEACHERS}.{text}" for text in given]
    case.config.distillation = load_config(
        file, [*base, *(text.replace("TEACHER", path) for text in named)]
    ).distillation


def put_one(case: Case, *given: str) -> None:
    put_teachers(case, "t.model_path=TEACHER", *given)


@fault(TAUGHT)
def no_teacher(case: Case, rng: Random) -> list[Said]:
    put_teachers(case)
    return [("distillation.enabled", "needs a teacher: set distillation.teacher_models.NAME.model_path")]


@fault(TAUGHT)
def teacher_without_folder(case: Case, rng: Random) -> list[Said]:
    put_teachers(case, "t.prompt_key=demonstration")
    return [(f"{TEACHERS}.t.model_path", "must be a model folder, or self")]


@fault(TAUGHT, offer=False)
def itself_without_a_hint(case: Case, rng: Random) -> list[Said]:
    put_teachers(case, "t.model_path=self")
    return [(f"{TEACHERS}.t.prompt_key", "with the same prompt it is its own teacher")]


@fault(TAUGHT)
def teachers_by_another_column(case: Case, rng: Random) -> list[Said]:
    put_one(case, "distillation.teacher_key=task")
    return [("distillation.teacher_key", "must be data.reward_fn_key=data_source")]


@fault(TAUGHT, offer=False)
def teacher_of_a_roles_name(case: Case, rng: Random) -> list[Said]:
    name = rng.choice(["actor", "rollout", "reference"])
    put_teachers(case, f"{name}.model_path=TEACHER")
    return [(f"{TEACHERS}.{name}.model_path", f"{name} is a role already")]


@fault(TAUGHT, offer=False)
def teacher_of_no_name(case: Case, rng: Random) -> list[Said]:
    put_teachers(case, "big-one.model_path=TEACHER")
    return [(f"{TEACHERS}.big-one.model_path", "and 'big-one' is none")]


@fault(TAUGHT, offer=False)
def prompts_with_two_teachers(case: Case, rng: Random) -> list[Said]:
    put_one(case, "u.model_path=TEACHER", "u.key=sums")
    return [(f"{TEACHERS}.t.key", "must be a value of column data_source, as there are 2 teachers")]


@fault(TAUGHT, offer=False)
def teachers_with_one_key(case: Case, rng: Random) -> list[Said]:
    put_one(case, "t.key=sums", "u.model_path=TEACHER", "u.key=sums")
    return [(f"{TEACHERS}.{name}.key", "must be the key of one teacher, and 2 have it") for name in "tu"]


@fault(TAUGHT)
def teacher_of_no_folder(case: Case, rng: Random) -> list[Said]:
    put_teachers(case, "t.model_path=TEACHERS")
    return [(f"{TEACHERS}.t.model_path", "must be a Hugging Face model folder, and it does not exist")]


@fault(TAUGHT)
def teacher_in_no_pool(case: Case, rng: Random) -> list[Said]:
    put_one(case, "t.pool=globl_pool")
    return [(f"{TEACHERS}.t.pool", "must be a pool that is defined: global_pool")]


@fault(TAUGHT)
def teacher_on_another_grid(case: Case, rng: Random) -> list[Said]:
    put_one(case, "t.megatron.pipeline_model_parallel_size=2")
    key = f"{TEACHERS}.t.megatron.pipeline_model_parallel_size"
    return [(key, "must equal actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=3")]


@fault(TAUGHT, offer=False)
def teacher_of_other_tokens(case: Case, rng: Random) -> list[Said]:
    put_one(case)
    for folder, number in (("model", 0), ("teacher", 1)):
        tokens = json.dumps({"model": {"vocab": {"a": number}}, "added_tokens": []})
        (case.folder / folder / "tokenizer.json").write_text(tokens)
    return [
        (f"{TEACHERS}.t.model_path", "must have the tokens of the policy, whose distribution over them is compared")
    ]


@fault(TAUGHT)
def teacher_with_long_prompts(case: Case, rng: Random) -> list[Said]:
    put_one(case, "t.prompt_key=demonstration", "t.max_prompt_length=17")
    rule = "and data.max_response_length=48 must be <= max_position_embeddings(64) of"
    return [(f"{TEACHERS}.t.max_prompt_length", rule)]


@fault(TAUGHT)
def teacher_with_short_passes(case: Case, rng: Random) -> list[Said]:
    put_one(case, "t.log_prob_use_dynamic_bsz=true", "t.log_prob_max_token_len_per_gpu=63")
    return [(f"{TEACHERS}.t.log_prob_max_token_len_per_gpu", "must be >= data.max_prompt_length + ")]


@fault(TAUGHT)
def divergence_as_an_advantage(case: Case, rng: Random) -> list[Said]:
    mode = rng.choice(["forward_kl", "jsd", "forward_kl_topk"])
    put_one(case, f"{MODE}={mode}")
    return [(GRADIENT, f"must be false with {MODE}={mode}")]


@fault(TAUGHT)
def gradient_that_knows_no_teacher(case: Case, rng: Random) -> list[Said]:
    mode = rng.choice(["kl", "k1"])
    put_one(case, f"{MODE}={mode}", f"{GRADIENT}=false")
    return [(MODE, "has no gradient that depends on the teacher")]


@fault(TAUGHT)
def another_temperature(case: Case, rng: Random) -> list[Said]:
    put_one(case, f"{LOSS}.temperature=2.0")
    return [(f"{LOSS}.temperature", f"must be null with {MODE}=k3")]
