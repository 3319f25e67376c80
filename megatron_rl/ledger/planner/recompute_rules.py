"""Whether the keys of recomputed activations go together and with the layers of every stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.config.problems import divisors, nearest_name, nearest_number
from megatron_rl.config.roles import ROLLOUT, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.ledger.planner.activations import SELECTIVE
from megatron_rl.ledger.planner.model_folder import ModelSizes
from megatron_rl.parallel.stages import StagePlan

GROUP = "megatron.override_transformer_config"
GRANULARITY, METHOD, NUMBER, MODULES = (
    f"recompute_{name}" for name in ("granularity", "method", "num_layers", "modules")
)
METHODS = ("uniform", "block")
FULL = "full"
PARTS = ("core_attn", "mlp", "moe")
"""Parts of a layer that can be made again. Megatron's layernorm and moe_act want transformer-engine's layers."""


def recompute_problems(config: RunConfig, models: Sequence[ModelSizes]) -> Iterable[Violation]:
    """Of all roles that the run has."""
    for role in roles_of(config):
        if role.kind != ROLLOUT:
            model = next((model for model in models if model.path == role.model_path), None)
            yield from _role_problems(role.key, role.megatron, model)


def _role_problems(role: str, megatron: MegatronConfig, model: ModelSizes | None) -> Iterable[Violation]:
    override = megatron.override_transformer_config
    granularity, method, number = (getattr(override, name) for name in (GRANULARITY, METHOD, NUMBER))
    sizes = [] if model is None else chunk_sizes(model, megatron)
    valid_method = method if method in METHODS else nearest_name(method or "", METHODS)
    valid_number = nearest_number_of_layers(valid_method, number or 1, sizes)
    given = {GRANULARITY: granularity, METHOD: method, NUMBER: number}
    valid = {GRANULARITY: FULL, METHOD: valid_method, NUMBER: valid_number}

    def violation(names: Sequence[str], rule: str, changed: Sequence[str]) -> Violation:
        nearest = {f"{role}.{GROUP}.{name}": valid[name] for name in changed if valid[name] != given[name]}
        return Violation({f"{role}.{GROUP}.{name}": given[name] for name in names}, rule, nearest)

    settings = [name for name in (METHOD, NUMBER) if given[name] is not None]
    yield from _part_problems(role, granularity, override.recompute_modules)
    if granularity in (None, SELECTIVE):
        if settings:
            other = "" if granularity else f", or {GRANULARITY} full"
            rule = f"must be null{other}: whole layers are what they count"
            names = {f"{role}.{GROUP}.{name}": given[name] for name in settings}
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


def _part_problems(role: str, granularity: str | None, parts: list[str] | None) -> Iterable[Violation]:
    if parts is None:
        return
    key = f"{role}.{GROUP}.{MODULES}"
    known = [part for part in parts if part in PARTS]
    if granularity != SELECTIVE:
        yield Violation({key: parts}, f"must be null, or {GRANULARITY} {SELECTIVE}", {key: None})
    elif known != parts or not parts:
        rule = f"must be some of {', '.join(PARTS)}: the others that Megatron knows want transformer-engine's layers"
        yield Violation({key: parts}, rule, {key: known or None})


def chunk_sizes(model: ModelSizes, megatron: MegatronConfig) -> list[int]:
    """Layers of every chunk of all stages; none where the layers do not spread over the stages."""
    try:
        stages = StagePlan.from_config(model.num_hidden_layers, megatron)
    except ValueError:
        return []
    return [len(chunk) for pp_rank in range(stages.pp_size) for chunk in stages.layers(pp_rank)]


def nearest_number_of_layers(method: str, number: int, sizes: Sequence[int]) -> int:
    """The number of layers nearest to `number` that goes with chunks of these sizes.

    Runs of a uniform method must come out even in all chunks, or Megatron asks for layers that are not there; of a
    block the largest chunk must have as many.
    """
    if not sizes:
        return max(1, number)
    if method == "block":
        return nearest_number(number, range(1, max(sizes) + 1))
    common = math.gcd(*sizes)
    return nearest_number(number, divisors(common))
