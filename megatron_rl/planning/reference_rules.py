"""Rules of a reference that follows its policy: it needs weights of its own, next to the policy's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_rl.config.keys import REF
from megatron_rl.config.roles import REFERENCE, RoleSpec, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.task_config import TaskConfig
from megatron_rl.config.tasks import DPO, PPO
from megatron_rl.errors import Violation

SYNC, ALPHA = f"{REF}.sync_ref_model", f"{REF}.ref_model_mixup_alpha"
BIAS = "moe_router_enable_expert_bias"


def followed_policies(config: RunConfig) -> set[str]:
    """Names of the roles to which a reference of the run moves."""
    if not config.actor_rollout_ref.ref.sync_ref_model:
        return set()
    return {role.kind.initial_of for role in roles_of(config) if role.kind.initial_of is not None}


def refresh_problems(config: RunConfig) -> Iterable[Violation]:
    """Every violation of `sync_ref_model`; none for a task that compares with no reference at all."""
    if not config.actor_rollout_ref.ref.sync_ref_model or config.trainer.stage not in (PPO, DPO):
        return
    roles = {role.name: role for role in roles_of(config)}
    broken = _broken_rule(config, roles.get(REFERENCE), config.actor_rollout_ref.actor.pool)
    if broken is not None:
        rule, nearest, hint = broken
        yield Violation({SYNC: True}, rule, nearest, hint)


def _broken_rule(
    config: RunConfig, reference: RoleSpec | None, actor_pool: str
) -> tuple[str, dict[str, Any], str] | None:
    """(the rule, the nearest choice, a hint) of the first that is broken."""
    off = {SYNC: False}
    if reference is None and isinstance(config, TaskConfig) and config.needs_reference:
        rule = (
            f"needs the reference's weights, and dpo.reference={config.dpo.reference} keeps its first log-probs alone"
        )
        return rule, {"dpo.reference": "on_the_fly"}, ""
    if reference is None:
        return "has no reference to move: nothing is compared with one", off, ""
    if reference.pool != actor_pool:
        rule = f"needs {REF}.pool={actor_pool}: the reference takes the actor's weights where they are"
        return rule, {f"{REF}.pool": actor_pool}, ""
    if config.actor_rollout_ref.model.lora.rank > 0 and config.actor_rollout_ref.ref.ref_model_mixup_alpha != 1:
        rule = f"needs {ALPHA}=1 with adapters: a mixture of two adapters is not one of the same rank"
        return rule, {ALPHA: 1.0}, ""
    if getattr(config.actor_rollout_ref.actor.megatron.override_transformer_config, BIAS):
        rule = f"must be false with {BIAS}=true: the biases of the actor's experts move, and the reference's do not"
        return rule, off, ""
    return None
