"""Rows of experts: their balance, and experts that a pass takes from another (router replay)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.keys import ACTOR, ROLLOUT
from megatron_rl.planning.feature_rows.option_rows import GROUP
from megatron_rl.planning.features import (
    ROLE,
    Feature,
    Relation,
    Requirement,
    RunFacts,
    Settings,
    Use,
    equals,
    of_roles,
    where,
)

MODE, FREQ = f"{ACTOR}.router_replay.mode", f"{ACTOR}.router_replay.compare_freq"
RETURNS = f"{ROLLOUT}.enable_rollout_routing_replay"
OFF, RECORDED, ENGINES = "disabled", "R2", "R3"
AUX, Z, BIAS = (f"{GROUP}.moe_{name}" for name in ("aux_loss_coeff", "z_loss_coeff", "router_enable_expert_bias"))


def _no_experts(run: RunFacts, use: Use) -> str:
    model = run.model_of(use.role or run.policy)
    return "the model has no experts" if model is not None and not model.num_experts else ""


def _no_bias(run: RunFacts, use: Use) -> str:
    model = run.model_of(use.role or run.policy)
    if model is None or model.has_expert_bias:
        return ""
    return _no_experts(run, use) or "the model does not choose experts by scores and a bias"


def _moved_biases(run: RunFacts) -> Iterator[Use]:
    for role in run.trained_roles:
        if role.megatron.override_transformer_config.bias_update_rate > 0:
            key = f"{role.key}.{BIAS}"
            yield Use({key: True}, {key: False}, role)


def _unreplayable(run: RunFacts, use: Use) -> str:
    model = run.model_of(run.policy)
    return "" if model is None or not model.num_experts else model.attention.unreplayable.get(run.device, "")


def without_engine(run: RunFacts, mode: str = OFF) -> Settings:
    """Return the settings of another mode than R3, without comparisons, which need R3."""
    compares = run.config.actor_rollout_ref.actor.router_replay.compare_freq > 0
    return {MODE: mode} | ({FREQ: 0} if compares else {})


def _engines(run: RunFacts) -> Iterator[Use]:
    if run.value(MODE) == ENGINES:
        yield Use({MODE: ENGINES}, without_engine(run))


EXPERTS = Requirement("a model with experts", _no_experts)
NO_DRAFTS = "vLLM returns no experts with speculative decoding"
ONE_LATE = "experts are read when a step is reported, and the next one may have replaced them"
NO_SHARED = "vLLM keeps the experts of whole blocks alone"
RETURNED = (
    Relation("speculative_decoding", NO_DRAFTS, {f"{ROLLOUT}.speculative": None}),
    Relation("shared_prompts", NO_SHARED, {f"{ROLLOUT}.prefix_match_unit": None}),
    Relation("async_scheduling", ONE_LATE, {f"{ROLLOUT}.async_scheduling": False}),
)

ROWS = (
    Feature(
        "balance_loss",
        "a loss that balances experts",
        {f"{ROLE}.{AUX}": 0.01},
        of_roles(AUX, 0.0, lambda factor: (factor or 0) > 0, trained=True),
        of_model=(EXPERTS,),
        in_tasks=True,
    ),
    Feature(
        "router_z_loss",
        "router z-loss",
        {f"{ROLE}.{Z}": 0.001},
        of_roles(Z, None, lambda factor: (factor or 0) > 0, trained=True),
        of_model=(EXPERTS,),
        in_tasks=True,
    ),
    Feature(
        "expert_bias",
        "biases that balance experts",
        {f"{ROLE}.{BIAS}": True},
        _moved_biases,
        excludes=(Relation("lora", "the base of an adapter stays, and its folder has no place for biases"),),
        of_model=(Requirement("experts that are chosen by scores and a bias", _no_bias),),
        in_tasks=True,
    ),
    Feature(
        "router_replay_r2",
        "router replay of the trainer's experts (R2)",
        {MODE: RECORDED},
        where(MODE, OFF, equals(RECORDED)),
        excludes=(
            Relation(
                "bypass",
                "no pass makes old log-probs, and none records experts",
                {MODE: ENGINES},
            ),
        ),
        of_model=(EXPERTS,),
    ),
    Feature(
        "router_replay_r3",
        "router replay of the engine's experts (R3)",
        {MODE: ENGINES},
        _engines,
        excludes=(*RETURNED,),
        of_model=(
            EXPERTS,
            Requirement(
                "attention for which vLLM returns experts",
                _unreplayable,
                lambda run, use: without_engine(run, RECORDED),
            ),
        ),
    ),
    Feature(
        "returned_experts",
        "experts of the engine, compared",
        {RETURNS: True},
        where(RETURNS),
        excludes=(*RETURNED,),
        of_model=(EXPERTS, Requirement("attention for which vLLM returns experts", _unreplayable)),
    ),
)
