"""Which layers of a model with experts have a dense MLP instead, as its config.json says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.model.families.family import Family

LISTED, STEP, FIRST = "mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace"
STEP_RULE = {LISTED: (), STEP: 1}
"""Qwen's keys: layers by number, and experts in every n-th layer only. Absent: experts are everywhere."""


def first_rule(absent: int) -> dict[str, object]:
    """DeepSeek's key: how many of the first layers are dense. absent: how many where config.json does not say."""
    return {FIRST: absent}


def dense_layers(family: Family, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Numbers of the layers without experts, ascending; () for a family without experts, whose layers are all alike."""
    if family.experts is None:
        return ()
    given = {key: settings.get(key) for key in family.experts.dense_keys}
    rules: dict[str, Any] = {
        key: family.experts.dense_keys[key] if value is None else value for key, value in given.items()
    }
    listed, step, first = rules.get(LISTED, ()), rules.get(STEP, 1), rules.get(FIRST, 0)
    layers = range(settings["num_hidden_layers"])
    return tuple(layer for layer in layers if layer in listed or (layer + 1) % step or layer < first)


def dense_layers_problem(family: Family, settings: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
    """The settings that say it and what must hold of them; None when they are right. Sizes must be right already."""
    if family.experts is None:
        return None
    given = {key: settings[key] for key in family.experts.dense_keys if settings.get(key) is not None}
    num_layers = settings["num_hidden_layers"]
    listed = given.get(LISTED, ())
    if any(not 0 <= layer < num_layers for layer in listed):
        return {LISTED: listed}, f"must be numbers of layers, from 0 to {num_layers - 1}"
    if len(dense_layers(family, settings)) == num_layers:
        return given, f"must leave experts to at least one of the {num_layers} layers"
    return None
