"""Rules of adapters (LoRA): their numbers, the linears they are for, and the PEFT folder that they start from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.adapter_folder import CONFIG, WEIGHTS, AdapterFiles, AdapterSettings, head_spec
from megatron_rl.config.lora import LINEARS, LoraConfig
from megatron_rl.config.problems import nearest_name
from megatron_rl.config.roles import RoleSpec, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError, Violation, shown
from megatron_rl.model.families import HEAD
from megatron_rl.model.families.adapter_params import (
    ALL_LINEAR,
    ENGINE_RANKS,
    Projection,
    adapter_specs,
    projections_of,
    stored_stacks,
)
from megatron_rl.parallel.stages import StagePlan
from megatron_rl.planning.feature_rows.adapter_rows import lora_key
from megatron_rl.planning.folder_checks import ModelSizes

DEFAULT = LoraConfig()
LEAST_LR, LEAST_RANK = 1e-5, 8
"""Below these adapters hardly learn: the rate that works is about ten times that of full training."""


def lora_problems(config: RunConfig, models: Sequence[ModelSizes], *, config_only: bool = False) -> Iterable[Violation]:
    """Every violation, for all roles that train adapters. config_only: folders of adapters need not exist."""
    by_path = {model.path: model for model in models}
    for role in adapted_roles(config):
        key, lora = lora_key(role), role.lora
        model = by_path.get(role.model_path)
        if lora.adapter_path is not None:
            yield from _folder_problems(role, key, model, config_only)
        if not 0 < lora.rank <= max(ENGINE_RANKS):
            continue  # none, or a number that its own rule reports
        yield from _value_problems(role, key)
        if model is not None:
            yield from _linear_problems(role, key, model)


def adapted_roles(config: RunConfig) -> list[RoleSpec]:
    """The trained roles whose configuration has adapters, or asks for something of them."""
    return [role for role in roles_of(config) if role.is_trained and (role.lora.rank or role.lora.adapter_path)]


def _value_problems(role: RoleSpec, key: str) -> Iterable[Violation]:
    lora = role.lora
    if lora.alpha == 0:
        rule = f"must be > 0 with {key}.rank={lora.rank}: adapters would add nothing, and have no gradients"
        yield Violation({f"{key}.alpha": lora.alpha}, rule, {f"{key}.alpha": DEFAULT.alpha})
    if lora.merge and not role.kind.is_sampled:
        yield Violation({f"{key}.merge": True}, f"is for generation, and {role.key} has none", {f"{key}.merge": False})


def _linear_problems(role: RoleSpec, key: str, model: ModelSizes) -> Iterable[Violation]:
    """Names that match nothing, linears that are left without adapters, and matrices smaller than the rank."""
    lora, candidates = role.lora, projections_of(model.parts.specs)
    if unknown := [*_name_problems(lora, key, model)]:
        yield from unknown
        return
    targets = [each for each in candidates if any(each.matches(pattern) for pattern in lora.target_modules)]
    left = [each for each in targets if not any(each.matches(pattern) for pattern in lora.exclude_modules)]
    nearest: dict[str, Any] = {f"{key}.exclude_modules": []}
    bare = _stages_without(role, model, left)
    if not targets or (bare and _stages_without(role, model, targets)):
        nearest = {f"{key}.target_modules": list(LINEARS)} | (nearest if lora.exclude_modules else {})
    if not left or bare:
        settings: dict[str, Any] = {
            f"{key}.target_modules": lora.target_modules,
            f"{key}.exclude_modules": lora.exclude_modules,
        }
        rule = f"leave no linear of {model.path} with an adapter"
        if left:
            settings[f"{role.key}.megatron.pipeline_model_parallel_size"] = role.megatron.pipeline_model_parallel_size
            rule = f"leave pipeline stage {', '.join(map(str, bare))} without an adapter: each must train something"
        yield Violation(settings, rule, nearest)
    yield from _half_problems(key, lora, left)
    widest = min((min(each.shape) for each in left), default=lora.rank)
    if lora.rank > widest:
        small = next(each for each in left if min(each.shape) == widest)
        rows, columns = small.shape
        rule = f"must be <= {widest}, the smaller side of {small.name} [{rows}, {columns}] of {model.path}"
        yield Violation({f"{key}.rank": lora.rank}, rule, {f"{key}.rank": widest})


def _name_problems(lora: LoraConfig, key: str, model: ModelSizes) -> Iterable[Violation]:
    """Names of no linear, and those of experts that a folder has in stacks."""
    candidates, stacks = projections_of(model.parts.specs), stored_stacks(model.parts.specs)
    names = sorted({alias for each in candidates for alias in each.aliases})
    for name in ("target_modules", "exclude_modules"):
        given = getattr(lora, name)
        wrong = [pattern for pattern in given if not any(each.matches(pattern) for each in candidates)]
        stacked = [pattern for pattern in wrong if any(each.matches(pattern) for each in stacks)]
        others = (each for each in given if each not in stacked)
        mended = list(dict.fromkeys(nearest_name(each, names) if each in wrong else each for each in others))
        if stacked:
            rule = f"names stacked experts of {model.path} with {', '.join(stacked)}, which have no adapters"
            mended = mended or ([ALL_LINEAR] if name == "target_modules" else [])
            yield Violation({f"{key}.{name}": given}, rule, {f"{key}.{name}": mended})
        elif wrong:
            rule = f"names no linear of {model.path} with {', '.join(wrong)}; it has {', '.join(names)}"
            yield Violation({f"{key}.{name}": given}, rule, {f"{key}.{name}": mended}, wrong_name=True)


def _half_problems(key: str, lora: LoraConfig, left: Sequence[Projection]) -> Iterable[Violation]:
    """Adapters of one half of what PEFT has in one parameter."""
    routed = [each for each in left if each.is_expert]
    given = {f"{key}.target_modules": lora.target_modules}
    numbers: dict[str, list[Projection]] = {}
    for each in routed:
        numbers.setdefault(each.weight, []).append(each)
    halves = [found[0] for weight, found in numbers.items() if weight.endswith("w13") and len(found) == 1]
    if halves:
        rule = f"give {halves[0].name} an adapter and not its other half: gate and up are one parameter in PEFT"
        settings = given | {f"{key}.exclude_modules": lora.exclude_modules}
        yield Violation(settings, rule, {f"{key}.target_modules": list(LINEARS), f"{key}.exclude_modules": []})


def _stages_without(role: RoleSpec, model: ModelSizes, adapted: Sequence[Projection]) -> list[int]:
    """Return the pipeline stages that would train nothing. The last one of a critic has its head."""
    try:
        stages = StagePlan.from_config(model.num_hidden_layers, role.megatron)
    except (ValueError, ZeroDivisionError):
        return []  # the layout's own rules report it
    last = stages.pp_size - 1
    layers = {int(each.linear.split(".")[2]) for each in adapted}
    held = ({layer for chunk in stages.layers(rank) for layer in chunk} for rank in range(stages.pp_size))
    return [rank for rank, own in enumerate(held) if not own & layers and not (role.has_value_head and rank == last)]


# A PEFT folder


def _folder_problems(role: RoleSpec, key: str, model: ModelSizes | None, config_only: bool) -> Iterable[Violation]:
    """What is wrong with `adapter_path`, or differs between it, the keys and the model.

    config_only: the folder may have no files.
    """
    lora, given = role.lora, {f"{key}.adapter_path": role.lora.adapter_path}
    none: dict[str, Any] = {f"{key}.adapter_path": None}
    folder = Path(str(lora.adapter_path)).expanduser()
    lacking = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if lacking and not config_only:
        rule = f"must be a PEFT folder with {CONFIG} and {WEIGHTS}; it is missing {' and '.join(lacking)}"
        yield Violation(given, rule, none)
    if CONFIG in lacking:
        return
    try:
        files = None if lacking or config_only else AdapterFiles.open(folder)
        settings = AdapterSettings.read(folder) if files is None else files.settings
    except ConfigError as error:
        yield Violation(given, f"must be a PEFT folder of plain LoRA: {error}", none)
        return
    rank, alpha = settings.rank, settings.alpha
    if not 0 < rank <= max(ENGINE_RANKS):
        rule = (
            f"must be a PEFT folder of a rank that generation has; its r is {rank}, and {max(ENGINE_RANKS)} is the most"
        )
        yield Violation(given, rule, none)
        return
    for name, mine, theirs in (("rank", lora.rank, rank), ("alpha", lora.alpha, alpha)):
        if mine != theirs and (name == "rank" or lora.rank):
            peft = "r" if name == "rank" else "lora_alpha"
            rule = f"must be {shown(theirs)}, the {peft} of {key}.adapter_path={lora.adapter_path}"
            yield Violation({f"{key}.{name}": mine}, rule, {f"{key}.{name}": theirs})
    if files is not None and model is not None and lora.rank == rank:
        yield from _tensor_problems(role, given, model, files)


def _tensor_problems(
    role: RoleSpec, given: dict[str, Any], model: ModelSizes, files: AdapterFiles
) -> Iterable[Violation]:
    """What a rank would find: a base or tensors that are not those of the model and its targets."""
    try:
        specs = adapter_specs(model.parts.specs, role.lora)
    except ConfigError:
        return  # the targets' own rule says so
    if role.has_value_head:
        specs |= {HEAD: head_spec(model.parts.value_specs[HEAD])}
    try:
        files.refuse_other_base(Path(model.path).expanduser())
        files.sources(specs)
    except ConfigError as error:
        yield Violation(given, f"must hold adapters of {model.path}: {error}")


# Advice


def lora_notes(config: RunConfig) -> list[str]:
    """Sentences about adapters whose numbers are allowed, and far from what is known to work."""
    notes = []
    for role in adapted_roles(config):
        lr, asked = role.settings.optim.lr, f"{lora_key(role)}.rank={role.lora.rank}"
        if lr < LEAST_LR:
            notes.append(
                f"{role.key}.optim.lr={lr:g} is low for adapters ({asked}): about ten times that of full training "
                f"works, {LEAST_LR:g} or more"
            )
        if role.lora.rank < LEAST_RANK:
            notes.append(f"{asked} is small: {LEAST_RANK} and more learn as well as full training")
    return notes
