"""Which rotary embeddings are supported, read from a config.json of any version of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Supported type -> the settings it needs. Their frequencies do not depend on the length of a sequence."""


def rope_of(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings of a config.json: `rope_parameters`, or `rope_scaling` before transformers 5."""
    return settings.get("rope_parameters") or settings.get("rope_scaling") or {}


def rope_type(settings: Mapping[str, Any]) -> str:
    """The type of the rotary embedding of a config.json."""
    rope = rope_of(settings)
    kind: str = rope.get("rope_type", rope.get("type", "default"))
    return kind


def rope_problem(settings: Mapping[str, Any]) -> str | None:
    """What is wrong with the rotary embedding that a config.json asks for; None when it is supported."""
    kind, rope = rope_type(settings), rope_of(settings)
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        return f"rope_type={kind!r} is not supported; known: {', '.join(ROPE_TYPES)}"
    lacking = [name for name in ROPE_TYPES[kind] if not isinstance(rope.get(name), int | float)]
    if lacking:
        return f"rope_type={kind!r} needs numbers for {', '.join(lacking)}; it has {dict(rope)}"
    fraction = rope.get("partial_rotary_factor", 1.0)
    if fraction != 1.0:
        return f"partial_rotary_factor={fraction} is not supported; nearest: 1.0"
    return None
