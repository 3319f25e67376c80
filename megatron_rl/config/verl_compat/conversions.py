"""Conversions of verl's values into other units or other keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.config.verl_compat import async_keys, teacher_keys
from megatron_rl.config.verl_compat.key_rows import Outcome

LAYOUT_OF = {"actor_rollout_ref.rollout": "actor_rollout_ref.actor", "actor_rollout_ref.ref": "actor_rollout_ref.actor"}

WITH_TRANSFORMER_ENGINE = ("layernorm", "moe_act")
"""Parts of a layer that Megatron recomputes only in transformer-engine's layers, or after it was imported."""

Conversion = Callable[[str, str, Any, Mapping[str, Any]], Outcome]
"""(the verl key, the key here or "", value, all settings) -> what becomes of it."""


def per_rank(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """Samples of all ranks -> of one data-parallel rank."""
    if not isinstance(value, int) or isinstance(value, bool):
        return {target: value}
    role = key.rpartition(".")[0]
    megatron = f"{LAYOUT_OF.get(role, role)}.megatron"
    ranks = async_keys.number(given, "trainer.nnodes", 1) * async_keys.number(given, "trainer.n_gpus_per_node", 8)
    shared = async_keys.number(given, f"{megatron}.tensor_model_parallel_size", 1)
    shared *= async_keys.number(given, f"{megatron}.pipeline_model_parallel_size", 1)
    shared *= async_keys.number(given, f"{megatron}.context_parallel_size", 1)
    return {target: max(1, value // max(1, ranks // shared))}


def share_of_lr(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """A share of the peak learning rate -> the rate."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return {target: value}
    peak = given.get(key.rpartition(".")[0] + ".lr", 1e-5 if key.startswith("critic.") else 1e-6)
    return {target: value * float(peak)}


def recomputed(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """FSDP's switch -> Megatron's; Megatron scripts have one of their own, and verl's engine does not read this one."""
    if any(".megatron." in other or names_megatron(other, chosen) for other, chosen in given.items()):
        return "Megatron's own switch is megatron.override_transformer_config.recompute_granularity"
    role = "critic" if key.startswith("critic.") else "actor_rollout_ref.actor"
    group = f"{role}.megatron.override_transformer_config"
    return {
        f"{group}.recompute_granularity": "full",
        f"{group}.recompute_method": "uniform",
        f"{group}.recompute_num_layers": 1,
    }


def known_parts(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """Parts of a layer to recompute -> those that can be; a part that does not exist stays, to be refused."""
    if not isinstance(value, list):
        return {key: value}
    kept = [part for part in value if part not in WITH_TRANSFORMER_ENGINE]
    return {key: kept} if kept else "no part of it can be made again here; without it core_attn is"


def truncated_importance(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """The earlier key, which is token weights and their threshold in one."""
    group = "algorithm.rollout_correction"
    return {f"{group}.rollout_is": "token", f"{group}.rollout_is_threshold": value}


def rule_by_source(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """No name of a function: verl takes the rule of the data source; here that is so only without a reward model and
    without an environment, which gives rewards too.
    """
    models = ("reward_model.enable", "reward.reward_model.enable")
    turns = (
        f"actor_rollout_ref.rollout.multi_turn.{name}" for name in ("environment.path", "agent.path", "agent.command")
    )
    if any(given.get(other) is True for other in models) or any(given.get(other) is not None for other in turns):
        return {key: None}
    if any(other.startswith("reward_models.") for other in given):
        return {key: None}
    return "without a reward model the reward function of the data source scores"


def graphs_of_gpus(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """Leave out graphs on a CPU: verl's scripts ask for them wherever they run."""
    if value is False and given.get("trainer.device") == "cpu":
        return "graphs only make steps faster, and there are none to capture on a CPU"
    return {key: value}


def names_megatron(key: str, value: Any) -> bool:
    """Return True for a setting that names Megatron as the engine."""
    return key.endswith(".strategy") and value == "megatron"


def whole_answer(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """The longest turn. A response is one turn here, so its limit must be the response's."""
    longest = given.get("actor_rollout_ref.rollout.response_length", given.get("data.max_response_length", 512))
    return "a response is one turn, and data.max_response_length limits it" if value in (None, longest) else None


def turns_with_tools(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """A file of tools, which asks for turns where nothing else says so: verl's own files of keys do."""
    switch = "actor_rollout_ref.rollout.multi_turn.enable"
    return {key: value} if switch in given or value is None else {key: value, switch: True}


def turns_of_user(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """Turns of the user, or of tools -> turns of the policy, which has the first and the last one."""
    known = "actor_rollout_ref.rollout.multi_turn.max_assistant_turns"
    most = given.get(known)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return {known: value + 1 if most is None else min(value + 1, most)}


MTP = "actor_rollout_ref.model.mtp"


def mtp_factor(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """Whether the MTP layer is trained -> the weight of its loss, verl's own where none is given. A trained layer
    makes draft tokens here, which change no response.
    """
    if value is not True:
        return "not asked for" if value in (None, False) else None
    factor = given.get(f"{MTP}.mtp_loss_scaling_factor")
    trained = {"actor_rollout_ref.actor.mtp_loss_scaling_factor": 0.1 if factor is None else factor}
    return trained | (
        {} if given.get(f"{MTP}.enable_rollout") is True else {"actor_rollout_ref.rollout.speculative": "mtp"}
    )


def mtp_detached(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """Whether the policy gets no gradient from the layer, which is so here."""
    is_trained = given.get(f"{MTP}.enable_train") is True
    return "the layer's inputs are detached" if value in (True, None) or not is_trained else None


def whole_experts(key: str, target: str, value: Any, given: Mapping[str, Any]) -> Outcome:
    """EP next to the ETP that only verl has -> all ranks of a replica, as vLLM has it; else as it is."""
    group = key.rpartition(".")[0]
    tp_size, dp_size = given.get(f"{group}.tensor_model_parallel_size"), given.get(f"{group}.data_parallel_size", 1)
    within = given.get(f"{group}.moe_tensor_parallel_size", 1)
    if not all(isinstance(size, int) for size in (value, tp_size, dp_size)) or value <= 1 or within == 1:
        return {key: value}
    return {key: tp_size * dp_size}


CONVERSIONS: dict[str, Conversion] = {
    "asynchronous": async_keys.asynchronous,
    "batch_of_prompts": async_keys.batch_of_prompts,
    "batches_ahead": async_keys.batches_ahead,
    "behaviour_as_old": async_keys.behaviour_as_old,
    "drawn_one_by_one": async_keys.drawn_one_by_one,
    "known_parts": known_parts,
    "graphs_of_gpus": graphs_of_gpus,
    "mtp_detached": mtp_detached,
    "mtp_factor": mtp_factor,
    "mini_batches_per_transfer": async_keys.mini_batches_per_transfer,
    "oldest_version": async_keys.oldest_version,
    "per_rank": per_rank,
    "pool_of_teachers": teacher_keys.pool_of_teachers,
    "recomputed": recomputed,
    "repeatable": async_keys.repeatable,
    "rule_by_source": rule_by_source,
    "share_of_lr": share_of_lr,
    "stale_groups": async_keys.stale_groups,
    "steps_ahead": async_keys.steps_ahead,
    "steps_of_prompts": async_keys.steps_of_prompts,
    "teacher_of_a_server": teacher_keys.teacher_of_a_server,
    "transfers_to_steps": async_keys.transfers_to_steps,
    "truncated_importance": truncated_importance,
    "turns_with_tools": turns_with_tools,
    "turns_of_user": turns_of_user,
    "whole_answer": whole_answer,
    "whole_experts": whole_experts,
}
"""Names of the table -> functions."""
