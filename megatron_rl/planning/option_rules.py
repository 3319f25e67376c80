"""Rules of Megatron's options: recomputation, context-parallel attention, balance of experts."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence

from megatron_rl.config.megatron import FUSED_KERNELS, PLAIN_KERNELS, MegatronConfig, OverrideTransformerConfig
from megatron_rl.config.problems import divisors, nearest_name, nearest_number
from megatron_rl.config.roles import RoleSpec, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.parallel.stages import StagePlan
from megatron_rl.planning.activations import SELECTIVE
from megatron_rl.planning.feature_rows.option_rows import GROUP, KERNELS
from megatron_rl.planning.folder_checks import ModelSizes

GRANULARITY, METHOD, NUMBER, MODULES = (
    f"recompute_{name}" for name in ("granularity", "method", "num_layers", "modules")
)
METHODS = ("uniform", "block")
FULL = "full"
DISTRIBUTIONS = {"fla": "flash-linear-attention"}
"""Module -> what to install for it."""
PARTS = ("core_attn", "mlp", "moe")
"""Parts of a layer that can be recomputed. Megatron's layernorm and moe_act need transformer-engine's layers."""

DYNAMIC = "dynamic_context_parallel"
WAYS = ("p2p", "all_gather", "a2a")

NONE, BY_ROW = "none", "seq_aux_loss"
BY_BLOCK = ("aux_loss", "global_aux_loss")
"""Megatron's other balancing losses."""
TYPE, AUX, Z = "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"
BIAS = "moe_router_enable_expert_bias"


def option_problems(
    config: RunConfig, models: Sequence[ModelSizes], *, config_only: bool = False
) -> Iterable[Violation]:
    """Every violation, for all roles on Megatron's grid. Constraints of single values are checked elsewhere.
    config_only: packages need not be installed.
    """
    by_path = {model.path: model for model in models}
    for role in (role for role in roles_of(config) if not role.kind.generates):
        model = by_path.get(role.model_path)
        yield from _recompute_problems(role, model)
        yield from _context_problems(role, model)
        yield from _shared_heads_problems(role, model)
        yield from _balance_problems(role, model)
        yield from _shared_by_problems(role)
        if not config_only:
            yield from _kernel_problems(role, model)


def _kernel_problems(role: RoleSpec, model: ModelSizes | None) -> Iterable[Violation]:
    """Packages that have kernels of the model's attention, and are not installed."""
    given = role.megatron.attention_kernels
    kinds = () if model is None or given != FUSED_KERNELS else model.parts.attentions
    for package in dict.fromkeys(kind.fused_package for kind in kinds if kind.fused_package):
        if importlib.util.find_spec(package) is None:
            name = DISTRIBUTIONS[package]
            rule = f"needs {name}, which is not installed: pip install {name}"
            yield Violation({f"{role.key}.{KERNELS}": given}, rule, {f"{role.key}.{KERNELS}": PLAIN_KERNELS})


def _asked_balance(role: RoleSpec) -> dict[str, bool | float]:
    """The options that balance experts and are set, by their names."""
    options = role.megatron.override_transformer_config
    return {name: getattr(options, name) for name in (AUX, Z, BIAS) if (getattr(options, name) or 0) > 0}


def _balance_problems(role: RoleSpec, model: ModelSizes | None) -> Iterable[Violation]:
    """Losses of routers, and biases that move against the load of experts."""
    asked = _asked_balance(role)
    if asked and not role.is_trained:
        given = {f"{role.key}.{GROUP}.{name}": value for name, value in asked.items()}
        rule = "must be off: only the experts of a role that is trained are balanced"
        yield Violation(given, rule, {key: False if key.endswith(BIAS) else 0.0 for key in given})
    elif not asked or model is None or model.num_experts:
        yield from _balance_loss_problems(role.megatron.override_transformer_config, f"{role.key}.{GROUP}")


def _balance_loss_problems(options: OverrideTransformerConfig, group: str) -> Iterable[Violation]:
    kind, key = options.moe_router_load_balancing_type, f"{group}.{TYPE}"
    if kind in BY_BLOCK:
        rule = "is not supported: its gradient depends on how a mini-batch is split into micro-batches"
        yield Violation({key: kind}, rule, {key: BY_ROW})
    elif kind not in (NONE, BY_ROW):
        nearest = nearest_name(str(kind), (NONE, BY_ROW))
        yield Violation({key: kind}, f"must be one of {NONE}, {BY_ROW}", {key: nearest}, wrong_name=True)
    elif kind == NONE and options.moe_aux_loss_coeff > 0:
        given = {f"{group}.{AUX}": options.moe_aux_loss_coeff, key: kind}
        yield Violation(given, f"is of no loss without {TYPE}={BY_ROW}", {key: BY_ROW})


def _context_problems(role: RoleSpec, model: ModelSizes | None) -> Iterable[Violation]:
    """How attention reaches the keys of other context-parallel ranks, against the model."""
    megatron = role.megatron
    how, key = megatron.override_transformer_config.cp_comm_type, f"{role.key}.{GROUP}.cp_comm_type"
    if how not in WAYS:
        yield Violation(
            {key: how}, f"must be one of {', '.join(WAYS)}", {key: nearest_name(str(how), WAYS)}, wrong_name=True
        )
    cp_size, tp_size = megatron.context_parallel_size, megatron.tensor_model_parallel_size
    if how != "a2a" or model is None or min(cp_size, tp_size) < 1 or model.num_attention_heads % tp_size:
        return
    heads = model.num_attention_heads // tp_size
    if heads % cp_size:
        subject = f"cp_comm_type=a2a with cp({cp_size})"
        rule = (
            "needs CP to divide the query heads of a TP rank, "
            f"num_attention_heads({model.num_attention_heads}) / tp({tp_size}) = {heads}, of {model.path}"
        )
        fitting = ", ".join(map(str, divisors(heads)))
        hint = f"a2a goes with context_parallel_size of {fitting}"
        yield Violation({key: how}, rule, {key: "p2p"}, hint, subject=subject)


def _shared_heads_problems(role: RoleSpec, model: ModelSizes | None) -> Iterable[Violation]:
    """Heads of which each context-parallel rank computes some, whatever way attention to keys goes."""
    tp_size, cp_size = role.megatron.tensor_model_parallel_size, role.megatron.context_parallel_size
    if model is None or tp_size < 1 or cp_size <= 1:
        return
    for name, number in model.attention.cp_divides.items():
        if number % tp_size or number // tp_size % cp_size == 0:
            continue
        key = f"{role.key}.megatron.context_parallel_size"
        rule = (
            f"must divide {name}({number}) / tp({tp_size}) = {number // tp_size}, of {model.path}: "
            "context-parallel ranks exchange tokens for heads"
        )
        yield Violation({key: cp_size}, rule, {key: nearest_number(cp_size, divisors(number // tp_size))})


def _shared_by_problems(role: RoleSpec) -> Iterable[Violation]:
    """The most ranks that share a sequence of a pass which chooses their number."""
    size = role.megatron.context_parallel_size
    if role.megatron.dynamic_context_parallel and size > 1 and size & (size - 1):
        key = f"{role.key}.megatron.context_parallel_size"
        powers = [1 << power for power in range(1, size.bit_length() + 1)]
        rule = f"must be a power of two with {DYNAMIC}=true: a pass uses 1, 2, 4 ... of these ranks"
        yield Violation({key: size}, rule, {key: nearest_number(size, powers)})


def _recompute_problems(role: RoleSpec, model: ModelSizes | None) -> Iterable[Violation]:
    """Keys of recomputed activations together, and with the layers of each chunk of a stage."""
    group, override = f"{role.key}.{GROUP}", role.megatron.override_transformer_config
    granularity, method, number = (getattr(override, name) for name in (GRANULARITY, METHOD, NUMBER))
    sizes = [] if model is None else chunk_sizes(model, role.megatron)
    valid_method = method if method in METHODS else nearest_name(method or "", METHODS)
    valid_number = nearest_number_of_layers(valid_method, number or 1, sizes)
    given = {GRANULARITY: granularity, METHOD: method, NUMBER: number}
    valid = {GRANULARITY: FULL, METHOD: valid_method, NUMBER: valid_number}

    def violation(names: Sequence[str], rule: str, changed: Sequence[str]) -> Violation:
        nearest = {f"{group}.{name}": valid[name] for name in changed if valid[name] != given[name]}
        return Violation({f"{group}.{name}": given[name] for name in names}, rule, nearest)

    settings = [name for name in (METHOD, NUMBER) if given[name] is not None]
    yield from _part_problems(group, granularity, override.recompute_modules)
    if granularity in (None, SELECTIVE):
        if settings:
            other = "" if granularity else f", or {GRANULARITY} full"
            rule = f"must be null{other}: they count whole layers"
            names = {f"{group}.{name}": given[name] for name in settings}
            yield Violation(names, rule, dict.fromkeys(names)) if granularity else violation(settings, rule, [*valid])
    elif granularity != FULL:
        rule = f"must be {FULL}, {SELECTIVE} or null"
        yield violation([GRANULARITY], rule, [*valid])
    else:
        if method not in METHODS:
            yield violation([METHOD], f"must be one of {', '.join(METHODS)}, as {GRANULARITY}=full", [METHOD])
        if number is None or number < 1:
            yield violation([NUMBER], f"must be >= 1, as {GRANULARITY}=full", [NUMBER])
        elif model is not None and number != valid_number:
            layers = ", ".join(map(str, sorted(set(sizes))))
            fits = "divide" if valid_method == "uniform" else "be <="
            rule = f"must, as {METHOD}={valid_method}, {fits} the layers of a stage's chunks({layers}) of {model.path}"
            yield violation([NUMBER], rule, [NUMBER])


def _part_problems(group: str, granularity: str | None, parts: list[str] | None) -> Iterable[Violation]:
    if parts is None:
        return
    key = f"{group}.{MODULES}"
    known = [part for part in parts if part in PARTS]
    if granularity != SELECTIVE:
        yield Violation({key: parts}, f"must be null, or {GRANULARITY} {SELECTIVE}", {key: None})
    elif known != parts or not parts:
        rule = f"may name only {', '.join(PARTS)}: Megatron's other modules need the layers of transformer-engine"
        yield Violation({key: parts}, rule, {key: known or None})


def chunk_sizes(model: ModelSizes, megatron: MegatronConfig) -> list[int]:
    """Layers of every chunk of all stages; an empty list if the layers do not spread over the stages."""
    try:
        stages = StagePlan.from_config(model.num_hidden_layers, megatron)
    except ValueError:
        return []
    return [len(chunk) for pp_rank in range(stages.pp_size) for chunk in stages.layers(pp_rank)]


def nearest_number_of_layers(method: str, number: int, sizes: Sequence[int]) -> int:
    """The number of layers nearest to `number` that fits chunks of these sizes.

    uniform: it must divide all chunks, or Megatron asks for layers that do not exist. block: the largest chunk must
    have as many layers.
    """
    if not sizes:
        return max(1, number)
    if method == "block":
        return nearest_number(number, range(1, max(sizes) + 1))
    common = math.gcd(*sizes)
    return nearest_number(number, divisors(common))
