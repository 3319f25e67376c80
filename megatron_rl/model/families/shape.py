"""Read the sizes and settings of one model from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.model.families.attention_keys import turned_elements
from megatron_rl.model.families.family import DENSE, FIRST, LISTED, MLP_KINDS, SPARSE, STEP, Family
from megatron_rl.model.families.registry import family_of
from megatron_rl.model.parts import Experts, ModelShape, Scoring

DEFAULT_NUM_LABELS = 2
"""transformers writes no labels for a classifier that has two."""


@dataclass(frozen=True)
class Routing:
    """How tokens are routed to experts. `ffn_size`: columns of one expert; `normalised`: a token's weights sum to 1.

    shared_size: columns of the MLP that every token passes next to them, 0 without one; shared_gate: its output is
    scaled per token. dense_layers: numbers of the layers that have a dense MLP instead. scoring: how experts are
    chosen, from at most `groups_per_token` of `num_groups` groups; None: by a softmax over all. scale: of the weights.
    """

    num_experts: int
    experts_per_token: int
    ffn_size: int
    normalised: bool
    shared_size: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    scoring: Scoring | None = None
    num_groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0

    @classmethod
    def from_hf(cls, family: Family, settings: Mapping[str, Any]) -> Routing:
        """Read it from the settings of a family with experts. Raises KeyError if a number is missing."""
        experts = experts_of(family)
        normalised, scoring = experts.norm_topk_prob, experts.scoring
        if normalised is None:
            normalised = bool(settings.get("norm_topk_prob", scoring is not None and scoring.normalised))
        groups = groups_of(scoring, settings)
        return cls(
            num_experts=settings[num_experts_key(family, settings)],
            experts_per_token=settings["num_experts_per_tok"],
            ffn_size=settings[experts.size_key],
            normalised=normalised,
            shared_size=shared_size(experts, settings),
            shared_gate=experts.shared is not None and experts.shared.gate is not None,
            dense_layers=dense_layers(family, settings),
            scoring=scoring,
            num_groups=groups[0],
            groups_per_token=groups[1],
            scale=settings.get("routed_scaling_factor", scoring.scale) if scoring else 1.0,
        )


def routing_of(family: Family, settings: Mapping[str, Any]) -> Routing | None:
    """How tokens are routed in a family with experts; None in others."""
    return None if family.experts is None else Routing.from_hf(family, settings)


def groups_of(scoring: Scoring | None, settings: Mapping[str, Any]) -> tuple[int, int]:
    """(groups of experts, groups that a token may use); (1, 1) if all experts are one group."""
    if scoring is None or (scoring.method and settings.get(scoring.method[0]) != scoring.method[1]):
        return 1, 1
    return settings.get("n_group") or 1, settings.get("topk_group") or 1


def routing_problem(routing: Routing) -> tuple[dict[str, Any], str] | None:
    """Settings that do not fit the groups of experts, and the rule that they break; None if they fit."""
    groups, per_token, experts = routing.num_groups, routing.groups_per_token, routing.num_experts
    if routing.scoring is None or groups == 1:
        return None
    if experts % groups or experts // groups < routing.scoring.best:
        least = f" of at least {routing.scoring.best}" if routing.scoring.best > 1 else ""
        return {"n_group": groups}, f"must cut {experts} experts into equal groups{least}"
    if per_token > groups or per_token * (experts // groups) < routing.experts_per_token:
        rule = f"must be <= n_group({groups}), and leave num_experts_per_tok({routing.experts_per_token}) experts"
        return {"topk_group": per_token}, rule
    return None


def shared_size(experts: Experts, settings: Mapping[str, Any]) -> int:
    """Columns of the shared experts together; 0 without any."""
    shared = experts.shared
    if shared is None:
        return 0
    count = 1 if shared.count_key is None else settings.get(shared.count_key) or 0
    return int(count * settings[shared.size_key])


def dense_layers(family: Family, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Numbers of the layers without experts, ascending; () for a family without experts."""
    if family.experts is None:
        return ()
    given = {key: settings.get(key) for key in family.experts.dense_keys}
    rules: dict[str, Any] = {
        key: family.experts.dense_keys[key] if value is None else value for key, value in given.items()
    }
    listed, step, first = rules.get(LISTED, ()), rules.get(STEP, 1), rules.get(FIRST, 0)
    listed = [*listed, *(layer for layer, kind in enumerate(rules.get(MLP_KINDS, ())) if kind == DENSE)]
    layers = range(settings["num_hidden_layers"])
    return tuple(layer for layer in layers if layer in listed or (layer + 1) % step or layer < first)


def routed_layers(family: Family, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Numbers of the layers with experts, ascending."""
    dense = dense_layers(family, settings)
    layers = range(0 if family.experts is None else settings["num_hidden_layers"])
    return tuple(layer for layer in layers if layer not in dense)


def dense_layers_problem(family: Family, settings: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Wrong settings of dense layers and the rule that they break; None if they are right. Check sizes before."""
    if family.experts is None:
        return None
    given = {key: settings[key] for key in family.experts.dense_keys if settings.get(key) is not None}
    num_layers = settings["num_hidden_layers"]
    listed = given.get(LISTED, ())
    if any(not 0 <= layer < num_layers for layer in listed):
        return {LISTED: listed}, f"must be numbers of layers, from 0 to {num_layers - 1}"
    dense = dense_layers(family, settings)
    if MLP_KINDS in family.experts.dense_keys:
        kinds, first = settings.get(MLP_KINDS), settings.get(FIRST)
        if kinds is not None and list(kinds) != [DENSE] * len(dense) + [SPARSE] * (num_layers - len(dense)):
            return {
                MLP_KINDS: kinds
            }, f"must name {num_layers} layers, {DENSE} ones before {SPARSE} ones, as vLLM counts"
        if first not in (None, len(dense)):
            return {FIRST: first}, f"must be {len(dense)}, as {MLP_KINDS} says, by which transformers builds layers"
    if len(dense) == num_layers:
        return given, f"must leave experts to at least one of the {num_layers} layers"
    return None


def experts_of(family: Family) -> Experts:
    """`Family.experts`. Raises ValueError for a family without experts."""
    if family.experts is None:
        raise ValueError(f"{family.architecture} has no experts")
    return family.experts


def num_experts_key(family: Family, settings: Mapping[str, Any]) -> str:
    """The key under which this config.json has, or should have, the number of experts."""
    keys = experts_of(family).count_keys
    return next((key for key in keys if settings.get(key) is not None), keys[0])


def shape_of(settings: Mapping[str, Any]) -> ModelShape:
    """Read a model's sizes from the settings of its config.json. Raises ConfigError for an unknown architecture."""
    family = family_of(settings["architectures"])
    settings = family.given(settings)
    routing = routing_of(family, settings)
    return ModelShape(
        num_layers=settings["num_hidden_layers"],
        hidden_size=settings["hidden_size"],
        num_heads=settings["num_attention_heads"],
        ffn_size=routing.ffn_size if routing else settings["intermediate_size"],
        vocab_size=settings["vocab_size"],
        tied=settings["tie_word_embeddings"],
        num_experts=routing.num_experts if routing else 0,
        experts_per_token=routing.experts_per_token if routing else 0,
        shared_size=routing.shared_size if routing else 0,
        dense_layers=routing.dense_layers if routing else (),
        dense_ffn_size=settings["intermediate_size"] if routing and routing.dense_layers else 0,
        qkv_bias=is_on(settings, family.qkv_bias_key),
        qk_norm=is_on(settings, family.qk_norm_key),
        **family.attention.sizes(settings),
    )


def is_on(settings: Mapping[str, Any], key: str | None) -> bool:
    """Whether a setting is true; False without a key."""
    return key is not None and bool(settings.get(key, False))


def head_cap(settings: Mapping[str, Any]) -> float | None:
    """The bound on the logits of a config.json's model; None without one."""
    family = family_of(settings["architectures"])
    key = family.style.head_cap
    return None if key is None else family.given(settings).get(key) or None


def sliding_window(family: Family, settings: Mapping[str, Any]) -> int | None:
    """Number of positions, including its own, that a token attends to; None: all before it."""
    window = family.window
    if window is None or (window.switch is not None and not settings.get(window.switch, False)):
        return None
    size: int | None = settings.get("sliding_window", window.default)
    return size


def full_attention(family: Family, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that replace a window by full attention, for runs where both are equal; {} without a window."""
    if family.window is None or sliding_window(family, settings) is None:
        return {}
    switch = {} if family.window.switch is None else {family.window.switch: False}
    return {"sliding_window": None, "layer_types": ["full_attention"] * settings["num_hidden_layers"], **switch}


def rollout_settings(family: Family, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that vLLM needs next to config.json to compute what transformers computes.

    settings: of the language model, and so are those that are returned (see `placed_settings`).
    """
    overrides, settings = full_attention(family, settings) | dict(family.rollout), family.given(settings)
    if family.attention.turned_key is not None:
        overrides[family.attention.turned_key] = turned_elements(family.attention, settings)
    if family.unpacks(settings):
        overrides["quantization_config"] = None
    if family.experts is not None and family.experts.scoring is not None:
        groups, per_token = groups_of(family.experts.scoring, settings)
        overrides |= {"n_group": groups, "topk_group": per_token}
    if family.experts is not None and MLP_KINDS in family.experts.dense_keys:
        overrides[FIRST] = len(dense_layers(family, settings))
    if family.inside is not None:
        # transformers reads that of the whole model, and vLLM the language model's.
        overrides |= {"tie_word_embeddings": settings["tie_word_embeddings"]}
    return overrides


def placed_settings(family: Family, overrides: dict[str, Any]) -> dict[str, Any]:
    """Settings of a language model as settings of the whole config.json."""
    return overrides if family.inside is None or not overrides else {family.inside.key: overrides}


def num_labels(settings: Mapping[str, Any]) -> int:
    """Outputs of a classification head."""
    if "num_labels" in settings:
        return int(settings["num_labels"])
    labels = settings.get("id2label")
    return DEFAULT_NUM_LABELS if labels is None else len(labels)
