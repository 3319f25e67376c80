"""Rows of LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.lora import LINEARS
from megatron_rl.config.roles import RoleSpec
from megatron_rl.errors import shown
from megatron_rl.model.families.adapter_params import ENGINE_RANKS, Projection, merged_alone, projections_of
from megatron_rl.planning.features import Feature, Relation, Requirement, RunFacts, Settings, Use, equals, where

ROUTED = "*.experts.*"
"""The element of exclude_modules that names all linears of routed experts."""
LORA = "actor_rollout_ref.model.lora"
FREEZE = "actor_rollout_ref.actor.megatron.freeze_vision_model"


def lora_key(role: RoleSpec) -> str:
    """The group of a role's adapters."""
    return f"{role.model_key.removesuffix('.path')}.lora"


def adapted(run: RunFacts) -> list[RoleSpec]:
    """Return the trained roles with adapters; a rank that its own check refuses is none."""
    return [role for role in run.trained_roles if 0 < role.lora.rank <= max(ENGINE_RANKS)]


def _lora(run: RunFacts) -> Iterator[Use]:
    for role in adapted(run):
        key = lora_key(role)
        off: Settings = {f"{key}.rank": 0} | ({f"{key}.adapter_path": None} if role.lora.adapter_path else {})
        yield Use({f"{key}.rank": role.lora.rank}, off, role)


def _merged(run: RunFacts) -> Iterator[Use]:
    for role in adapted(run):
        if role.kind.is_sampled and role.lora.merge:
            key = f"{lora_key(role)}.merge"
            yield Use({key: True}, {key: False}, role)


def _merged_alone(run: RunFacts, use: Use) -> str:
    """Why generation reads the role's model merged alone, whatever the targets are."""
    role = use.role
    model = None if role is None or not role.kind.is_sampled or role.lora.merge else run.model_of(role)
    if model is None:
        return ""
    if model.parts.family.inside is not None:
        return "the language model is inside of a larger one, of which generation reads adapters merged alone"
    why = merged_alone(model.parts.specs)
    return f"{why}, so that generation reads this model's merged alone" if why else ""


def routed_targets(run: RunFacts, role: RoleSpec) -> tuple[list[Projection], list[Projection]]:
    """Return the linears that get an adapter, and those of routed experts among them."""
    model, lora = run.model_of(role), role.lora
    if model is None or not model.num_experts:
        return [], []
    candidates = projections_of(model.parts.specs)
    targets = [each for each in candidates if any(each.matches(pattern) for pattern in lora.target_modules)]
    left = [each for each in targets if not any(each.matches(pattern) for pattern in lora.exclude_modules)]
    return left, [each for each in left if each.is_expert]


def _of_experts(run: RunFacts) -> Iterator[Use]:
    for role in adapted(run):
        left, routed = routed_targets(run, role)
        if not routed:
            continue
        key, lora = lora_key(role), role.lora
        off: Settings = {f"{key}.exclude_modules": list(dict.fromkeys([*lora.exclude_modules, ROUTED]))}
        if len(routed) == len(left):
            off[f"{key}.target_modules"] = list(LINEARS)
        yield Use({f"{key}.target_modules": lora.target_modules}, off, role)


def _unmerged(run: RunFacts, use: Use) -> str:
    role = use.role
    if role is None or not role.kind.is_sampled or role.lora.merge or not run.on_cpu or _merged_alone(run, use):
        return ""
    _, routed = routed_targets(run, role)
    return (
        f"they reach routed experts, such as {routed[0].name}, and vLLM's kernels of experts on CPUs add no adapters; "
        f"{lora_key(role)}.exclude_modules={shown([*role.lora.exclude_modules, ROUTED])} gives them none"
    )


def _float32(run: RunFacts, use: Use) -> str:
    role = use.role
    if role is None or not role.kind.is_sampled or role.lora.merge or run.on_cpu or _merged_alone(run, use):
        return ""
    dtype = role.megatron.dtype
    return f"vLLM's kernels of adapters on GPUs have no {dtype}" if dtype == "float32" else ""


def merge_choices(run: RunFacts) -> Iterator[tuple[RoleSpec, str]]:
    """Yield each role whose generation needs merged adapters and has others, with the reason, where merging helps."""
    if run.config.actor_rollout_ref.rollout.drop_train_weights:
        return
    for role in adapted(run):
        use = Use({}, {}, role)
        if why := _merged_alone(run, use) or _float32(run, use):
            yield role, why
        elif routed_targets(run, role)[1] and _unmerged(run, use):
            yield role, "vLLM's kernels of experts on CPUs add no adapters"


def _merge(run: RunFacts, use: Use) -> Settings:
    assert use.role is not None  # every use of adapters has a role
    drops = run.config.actor_rollout_ref.rollout.drop_train_weights
    return use.off if drops else {f"{lora_key(use.role)}.merge": True}


def _unmerged_key(run: RunFacts, use: Use) -> Settings:
    return {} if use.role is None else {f"{lora_key(use.role)}.merge": False}


def _unmerged_dtype(run: RunFacts, use: Use) -> Settings:
    key = f"{use.role.key}.megatron.dtype" if use.role is not None else ""
    return _unmerged_key(run, use) | ({key: run.value(key), "trainer.device": run.device} if key else {})


ROWS = (
    Feature(
        "lora",
        "LoRA adapters",
        {f"{LORA}.rank": 8},
        _lora,
        of_model=(
            Requirement(
                f"{LORA}.merge=true, or linear layers that have adapters in vLLM",
                _merged_alone,
                _merge,
                keys=_unmerged_key,
            ),
        ),
        of_layout=(
            Requirement(
                f"{LORA}.merge=true, or 16 bits on GPUs",
                _float32,
                _merge,
                keys=_unmerged_dtype,
            ),
        ),
        in_tasks=True,
    ),
    Feature(
        "trained_tower",
        "a vision tower that is trained",
        {FREEZE: False},
        where(FREEZE, True, equals(False)),
        needs=(Relation("images", "without images its gradient is 0", gives_up=True),),
        excludes=(Relation("lora", "adapters train linears of the language model, and the folder's weights stay"),),
    ),
    Feature("merged_adapters", "generation with merged adapters", {f"{LORA}.merge": True}, _merged),
    Feature(
        "expert_adapters",
        "LoRA adapters of routed experts",
        {f"{LORA}.target_modules": ["gate_proj", "up_proj", "down_proj"]},
        _of_experts,
        of_layout=(
            Requirement(
                f"{LORA}.merge=true, or no generation",
                _unmerged,
                _merge,
                keys=_unmerged_key,
            ),
        ),
        refused_unproven=True,
        in_tasks=True,
    ),
)
