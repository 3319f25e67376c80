"""Rules of what keeps the load of experts even: losses of routers, and biases that move against the load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_rl.config.megatron import OverrideTransformerConfig
from megatron_rl.config.problems import nearest_name
from megatron_rl.config.roles import ACTOR, ROLLOUT, RoleSpec, roles_of, rollout_pool
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.ledger.planner.model_folder import ModelSizes

NONE, BY_ROW = "none", "seq_aux_loss"
BY_BLOCK = ("aux_loss", "global_aux_loss")
"""Megatron's others."""
TYPE, AUX, Z = "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"
BIAS = "moe_router_enable_expert_bias"


def balance_problems(config: RunConfig, models: Sequence[ModelSizes]) -> Iterable[Violation]:
    """Of all roles that the run has. Numbers out of their ranges are left to the rules of single values."""
    for role in roles_of(config):
        if role.kind == ROLLOUT:
            continue
        options, group = role.megatron.override_transformer_config, f"{role.key}.megatron.override_transformer_config"
        model = next((model for model in models if model.path == role.model_path), None)
        asked = {name: getattr(options, name) for name in (AUX, Z, BIAS) if (getattr(options, name) or 0) > 0}
        if asked and role.kind != ACTOR:
            given = {f"{group}.{name}": value for name, value in asked.items()}
            nearest = {f"{group}.{name}": False if name == BIAS else 0.0 for name in asked}
            yield Violation(given, "must be off: only the actor's experts are balanced", nearest)
        elif asked and model is not None and not model.num_experts:
            given = {f"{group}.{name}": value for name, value in asked.items()}
            nearest = {f"{group}.{name}": False if name == BIAS else 0.0 for name in asked}
            yield Violation(given, f"needs a model with experts, and {model.path} has none", nearest)
        else:
            yield from _loss_problems(options, group)
            yield from _bias_problems(config, role, options, group, model)


def _loss_problems(options: OverrideTransformerConfig, group: str) -> Iterable[Violation]:
    kind, key = options.moe_router_load_balancing_type, f"{group}.{TYPE}"
    if kind in BY_BLOCK:
        rule = "is not here: its gradient depends on how a mini-batch is cut into micro-batches"
        yield Violation({key: kind}, rule, {key: BY_ROW})
    elif kind not in (NONE, BY_ROW):
        nearest = nearest_name(str(kind), (NONE, BY_ROW))
        yield Violation({key: kind}, f"must be one of {NONE}, {BY_ROW}", {key: nearest})
    elif kind == NONE and options.moe_aux_loss_coeff > 0:
        given = {f"{group}.{AUX}": options.moe_aux_loss_coeff, key: kind}
        yield Violation(given, f"is of no loss without {TYPE}={BY_ROW}", {key: BY_ROW})


def _bias_problems(
    config: RunConfig, role: RoleSpec, options: OverrideTransformerConfig, group: str, model: ModelSizes | None
) -> Iterable[Violation]:
    if not options.moe_router_enable_expert_bias:
        return
    key = f"{group}.{BIAS}"
    if model is not None and not model.has_expert_bias:
        rule = f"needs a model whose experts are chosen by scores and a bias, and {model.path} has none"
        yield Violation({key: True}, rule, {key: False})
    if role.pool != rollout_pool(config):
        rule = "must be false where generation is in another pool: only weights are sent there"
        yield Violation({key: True}, rule, {key: False})
