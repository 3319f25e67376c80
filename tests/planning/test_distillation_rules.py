"""Teachers: what is allowed, what is refused word for word, and that nothing is said where there are none."""

from __future__ import annotations

import pytest
from fault import base_config, good_case
from model_folders import problems
from teacher_faults import GRADIENT, LOSS, MODE, SELF, TEACHERS, WHOLE, put_one, put_teachers

from megatron_rl.config.schema import PoolConfig


@pytest.fixture
def case(tmp_path):
    """Six ranks, TP2 x PP3; prompts of 16 tokens, answers of 48, models of 64 positions."""
    (tmp_path / "base").mkdir()
    return good_case(tmp_path, base_config(tmp_path / "base"), experts=False)


def in_words(case) -> list[str]:
    return [text.replace(str(case.folder), "FOLDER") for text in problems(case.config)]


@pytest.mark.parametrize(
    "given",
    [
        ("t.model_path=TEACHER",),
        ("t.model_path=TEACHER", *WHOLE, f"{LOSS}.temperature=2.0", f"{LOSS}.use_task_rewards=false"),
        ("t.model_path=TEACHER", f"{MODE}=k2", f"{GRADIENT}=false"),
        ("t.model_path=TEACHER", f"{MODE}=reverse_kl_topk", f"{GRADIENT}=false", f"{LOSS}.topk_tail=true"),
        ("t.model_path=TEACHER", "t.key=sums", "u.model_path=TEACHER", "u.key=words"),
        SELF,
        (*SELF, f"{MODE}=forward_kl_topk", f"{GRADIENT}=false"),
        ("t.model_path=TEACHER", "t.prompt_key=demonstration", "t.max_prompt_length=16"),
    ],
)
def test_what_is_allowed(case, given):
    """Ways to learn, several teachers, and the actor itself. Would not catch a rule that is missing."""
    put_teachers(case, *given)
    assert in_words(case) == []


def test_the_actors_own_head_may_be_used_once_a_step(case):
    """Where it does not move before. Would not catch two epochs, which the rule names as well."""
    put_teachers(case, *SELF, *WHOLE)
    (found,) = in_words(case)
    actor = "actor_rollout_ref.actor"
    assert found == (
        f"{MODE}=forward_kl and {actor}.ppo_mini_batch_size=32 and {actor}.ppo_epochs=1 do not go together: with a "
        "teacher self the head that it is read with moves after one optimizer step; try: "
        f"{actor}.ppo_mini_batch_size=64 {actor}.ppo_epochs=1; or set {MODE}=forward_kl_topk"
    )
    case.set({f"{actor}.ppo_mini_batch_size": 64})
    assert in_words(case) == []


def test_a_pool_of_its_own_has_its_own_layout(case):
    """Of other ranks, TP and PP, in another dtype; in the actor's pool all of these are the actor's.

    Would not catch a teacher that does not fit.
    """
    group = f"{TEACHERS}.t.megatron"
    own = ["t.megatron.tensor_model_parallel_size=1", "t.megatron.pipeline_model_parallel_size=2"]
    put_one(case, *own, "t.megatron.dtype=bfloat16")
    shared = "because all roles share one grid of processes"
    actor = "actor_rollout_ref.actor.megatron"
    assert sorted(in_words(case)) == [
        f"{group}.dtype=bfloat16 must equal {actor}.dtype=float32, {shared}; try: float32",
        f"{group}.pipeline_model_parallel_size=2 must equal {actor}.pipeline_model_parallel_size=3, {shared}; try: 3",
        f"{group}.tensor_model_parallel_size=1 must equal {actor}.tensor_model_parallel_size=2, {shared}; try: 2",
    ]
    case.config.pools["teachers"] = PoolConfig(1, 2)
    case.set({f"{TEACHERS}.t.pool": "teachers"})
    assert in_words(case) == []
    case.set({f"{group}.tensor_model_parallel_size": 2})
    assert in_words(case) == [
        f"tp(2) * pp(2) of {group} must divide the 2 ranks (pools.teachers.nnodes=1 * pools.teachers.n_gpus_per_node=2)"
        f"; try: {group}.tensor_model_parallel_size=1; or see what fits: megatron-rl map --config FILE --gpus 8"
    ]


def test_roles_of_a_teachers_pool_share_its_layout(case):
    """Two teachers in one pool. Would not catch a pool with a trained role."""
    case.config.pools["teachers"] = PoolConfig(1, 2)
    pool = [f"{name}.pool=teachers" for name in "tu"]
    layout = [f"{name}.megatron.{size}=1" for name in "tu" for size in ("tensor_model_parallel_size",)]
    stages = ["t.megatron.pipeline_model_parallel_size=2", "u.megatron.pipeline_model_parallel_size=1"]
    keys = ["t.key=sums", "u.key=words", "u.model_path=TEACHER"]
    put_one(case, *pool, *layout, *stages, *keys)
    (found,) = in_words(case)
    key = "megatron.pipeline_model_parallel_size"
    assert found == (
        f"{TEACHERS}.u.{key}=1 must equal {TEACHERS}.t.{key}=2, because all roles of teachers share one grid of "
        "processes; try: 2"
    )


def test_nothing_is_said_of_teachers_that_are_not_asked_for(case):
    """All that would be wrong, with enabled=false. Would not catch a value out of its range."""
    put_teachers(case, "actor.model_path=nowhere", "t.prompt_key=x", "t.key=a", "u.key=a", f"{MODE}=jsd")
    assert len(in_words(case)) > 4
    case.set({"distillation.enabled": False})
    assert in_words(case) == []
