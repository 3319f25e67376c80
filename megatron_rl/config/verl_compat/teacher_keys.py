"""Conversions of verl's keys of teachers, which are inference servers there and roles on ranks of the run here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.config.megatron import COUNTED_PARTS
from megatron_rl.config.verl_compat.async_keys import number
from megatron_rl.config.verl_compat.key_rows import Outcome

TEACHERS, ACTOR, POOL = "distillation.teacher_models", "actor_rollout_ref.actor.megatron", "teachers"
VERLS_TP, VERLS_GPUS = 2, 8
"""Defaults of a teacher's server, and of the GPUs of a machine."""
OFF = {
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    **dict.fromkeys(COUNTED_PARTS, False),
    "expert_tensor_parallel_size": None,
    "dynamic_context_parallel": False,
}
"""Keys of a layout that a teacher on ranks of its own does not take from the actor."""


def pool_of_teachers(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """Machines of all teachers -> a pool that they share, each with the tensor parallel size of its server."""
    if not isinstance(value, int) or isinstance(value, bool):
        return {key: value}
    per_node = number(given, "distillation.n_gpus_per_node", VERLS_GPUS)
    settings: dict[str, Any] = {f"pools.{POOL}.nnodes": value, f"pools.{POOL}.n_gpus_per_node": per_node}
    names = {other[len(TEACHERS) + 1 :].partition(".")[0] for other in given if other.startswith(f"{TEACHERS}.")}
    if "distillation.teacher_model.model_path" in given:
        names.add("teacher_model")
    for name in sorted(names):
        group = f"{TEACHERS}.{name}"
        inference = (f"{group}.inference", "distillation.teacher_model.inference")
        tp_keys = [f"{server}.tensor_model_parallel_size" for server in inference]
        tp = next((number(given, tp_key, VERLS_TP) for tp_key in tp_keys if tp_key in given), VERLS_TP)
        sizes = {"tensor": min(tp, value * per_node), "pipeline": 1, "expert": 1}
        layout: dict[str, Any] = {f"{name}_model_parallel_size": size for name, size in sizes.items()}
        layout |= {"context_parallel_size": 1} | {name: off for name, off in OFF.items() if f"{ACTOR}.{name}" in given}
        wanted = {f"{group}.pool": POOL} | {f"{group}.megatron.{name}": size for name, size in layout.items()}
        settings |= {wanted_key: size for wanted_key, size in wanted.items() if wanted_key not in given}
    return settings


def teacher_of_a_server(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """The recipe gkd: the loss of its server's top-k, without rewards. Only the user knows the folder of the teacher,
    which the server was started with.
    """
    if value is None:
        return "no teacher behind a server"
    loss = "distillation.distillation_loss"
    wanted = {
        "distillation.enabled": True,
        f"{TEACHERS}.teacher.model_path": None,
        f"{loss}.loss_mode": "forward_kl_topk",
        f"{loss}.use_policy_gradient": False,
        f"{loss}.use_task_rewards": False,
        "algorithm.adv_estimator": "grpo",
    }
    if "rollout.nnodes" in given:
        wanted["actor_rollout_ref.hybrid_engine"] = False
    return {wanted_key: setting for wanted_key, setting in wanted.items() if wanted_key not in given}
