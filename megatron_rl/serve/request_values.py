"""Read and check the values of a request; a refusal names the field, the value and the nearest choice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.keys import LEAVES
from megatron_rl.losses.summed import COUNTED, OF_THE_API, SummedLoss
from megatron_rl.serve.bad_request import BadRequest, one_of, shown
from megatron_rl.serve.client_commands import ForwardBackward, Row
from megatron_rl.serve.tinker_messages import INT32, tensor_values, values_of

MOST_SAMPLES = 1024
"""Of one request."""
ADAM_RANGES = {
    "learning_rate": (0.0, 1e3),
    "beta1": (0.0, 0.999999),
    "beta2": (0.0, 0.9999999),
    "eps": (1e-20, 1e6),
    "weight_decay": (0.0, 1e3),
    "grad_clip_norm": (0.0, 1e9),
}


@dataclass(frozen=True)
class ServedModel:
    """The model of a service. base_model: its folder, as the configuration names it. rank: its adapters'; 0: all
    weights are trained. longest: most tokens of a row. num_tokens: the first ids, which are tokens of the policy.
    losses: by their names. seeds_adapters: adapters begin with values of a seed, and not with those of a file.
    """

    base_model: str
    rank: int
    longest: int
    num_tokens: int
    trains_mlp: bool = True
    trains_attention: bool = True
    seeds_adapters: bool = True
    losses: Mapping[str, SummedLoss] = field(default_factory=lambda: OF_THE_API)


def number(body: Mapping[str, Any], name: str, low: float, high: float, default: float | None = None) -> float:
    """A finite number from `low` to `high`."""
    value = body.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequest(name, f"{shown(value)} is no finite number; try: {low if default is None else default}")
    if not low <= value <= high:
        raise BadRequest(name, f"{value} is not from {low} to {high}; try: {min(max(value, low), high)}")
    return float(value)


def whole(body: Mapping[str, Any], name: str, low: int, high: int, default: int | None = None) -> int:
    """A whole number from `low` to `high`."""
    value = body.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(name, f"{shown(value)} is no whole number; try: {low if default is None else default}")
    if not low <= value <= high:
        raise BadRequest(name, f"{value} is not from {low} to {high}; try: {min(max(value, low), high)}")
    return value


def text(body: Mapping[str, Any], name: str) -> str:
    """A text that is not empty."""
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise BadRequest(name, f"{shown(value)} is no text")
    return value


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(name, f"{shown(value)} is neither true nor false")
    return value


def tokens(field: str, values: Sequence[Any], served: ServedModel) -> tuple[int, ...]:
    """Ids of tokens of the policy, at most as many as a row may have."""
    if len(values) > served.longest:
        raise BadRequest(field, f"{len(values)} tokens are more than the {served.longest} of a row")
    for place, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < served.num_tokens:
            rule = f"{shown(value)} is no token of the model"
            raise BadRequest(f"{field}[{place}]", f"{rule}, which are 0 to {served.num_tokens - 1}")
    return tuple(values)


def read_pass(message: Mapping[str, Any], model: str, served: ServedModel) -> ForwardBackward:
    """The command of a forward_backward request in Protocol Buffers."""
    name = one_of("loss_fn", message.get("loss_fn"), served.losses)
    loss = served.losses[name]
    settings = read_settings(message, loss)
    if not message["data"]:
        raise BadRequest("data", "there is no datum; try: one")
    rows = tuple(read_row(f"data[{place}]", one, loss, served) for place, one in enumerate(message["data"]))
    return ForwardBackward(model, name, settings, rows, bool(message.get("forward_only", 0)))


def read_settings(message: Mapping[str, Any], loss: SummedLoss) -> dict[str, float]:
    """All settings of a loss: those of a request, and defaults."""
    settings = dict(loss.defaults)
    sent = {name: value.get("text", value.get("number")) for name, value in message["loss_fn_config_v2"].items()}
    for name, value in (message["loss_fn_config"] | sent).items():
        known = one_of("loss_fn_config", name, settings)
        settings[known] = number({known: value}, known, *((-1e6, 1e6) if loss.keys else (0.0, 1e6)))
        if loss.keys and not (bounds := LEAVES[loss.keys[known]]).holds(settings[known]):
            problem = bounds.violation(known, settings[known], loss.defaults[known], None)
            raise BadRequest(known, f"{settings[known]} {problem.rule}; try: {problem.nearest[known]}")
    if settings.get("clip_low_threshold", 0.0) > settings.get("clip_high_threshold", 1.0):
        low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
        raise BadRequest("loss_fn_config", f"clip_low_threshold={low} is above clip_high_threshold={high}")
    return settings


def read_row(field: str, datum: Mapping[str, Any], loss: SummedLoss, served: ServedModel) -> Row:
    """A datum: its targets must be its input, shifted by one token."""
    given: list[int] = []
    for place, chunk in enumerate(datum["model_input"]):
        if "encoded_text" not in chunk:
            kind = next(iter(chunk), "nothing")
            raise BadRequest(f"{field}.model_input[{place}]", f"{kind} is not served; try: encoded_text")
        given += values_of(f"{field}.model_input[{place}]", chunk["encoded_text"].get("tokens", b""), INT32)
    inputs = tokens(f"{field}.model_input", given, served)
    if not inputs:
        raise BadRequest(f"{field}.model_input", "it has no token; try: one")
    if len(inputs) >= served.longest:
        rule = f"{len(inputs)} tokens and the last target are more than the {served.longest} of a row"
        raise BadRequest(f"{field}.model_input", rule)
    wanted, sent = ("target_tokens", *loss.reads), datum["loss_fn_inputs"]
    for name in sent:
        one_of(f"{field}.loss_fn_inputs", name, wanted)
    columns = {name: _column(f"{field}.loss_fn_inputs.{name}", sent.get(name), name, len(inputs)) for name in wanted}
    targets = tokens(f"{field}.loss_fn_inputs.target_tokens", columns["target_tokens"], served)
    for place, (target, following) in enumerate(zip(targets, inputs[1:], strict=False)):
        if target != following:
            rule = f"{target} is not the input's next token, {following}"
            raise BadRequest(f"{field}.loss_fn_inputs.target_tokens[{place}]", f"{rule}; other targets are not served")
    counted = tuple(float(one != 0) for one in columns.get(COUNTED, ()))
    return Row((*inputs, targets[-1]), tuple(columns[loss.reads[-1]]), tuple(columns.get("logprobs", ())), counted)


def _column(field: str, tensor: Mapping[str, Any] | None, name: str, size: int) -> list[Any]:
    if tensor is None:
        raise BadRequest(field, f"it is missing; try: {size} values, one for each token of model_input")
    values = tensor_values(field, tensor)
    if len(values) != size:
        raise BadRequest(field, f"{len(values)} values do not fit {size} tokens of model_input; try: {size}")
    for place, value in enumerate(values):
        if not math.isfinite(value):
            raise BadRequest(f"{field}[{place}]", f"{value} is not finite")
        if name == "target_tokens" and not isinstance(value, int):
            raise BadRequest(f"{field}.dtype", "targets are float32; try: int64")
    return values


def read_adam(body: Mapping[str, Any]) -> dict[str, float]:
    """Adam's parameters of one step."""
    if "optimizer_params" in body:
        raise BadRequest("optimizer_params", "only Adam is served; try: adam_params")
    given = body.get("adam_params")
    if not isinstance(given, dict):
        raise BadRequest("adam_params", f"{shown(given)} are no parameters of Adam")
    for name in given:
        one_of("adam_params", name, ADAM_RANGES)
    return {name: number(given, name, *ADAM_RANGES[name]) for name in given if given[name] is not None}


def adapter_seed(lora: Any, served: ServedModel) -> int | None:
    """The seed of a model's adapters; None: the service's. Raises BadRequest where a seed changes nothing."""
    if lora.get("seed") is None:
        return None
    if not served.rank or not served.seeds_adapters:
        reason = "its adapters begin with those of lora.adapter_path" if served.rank else "all weights are trained"
        raise BadRequest("lora_config.seed", f"{shown(lora['seed'])} is not served: {reason}; try: null")
    return whole(lora, "seed", -(1 << 63), (1 << 63) - 1)
