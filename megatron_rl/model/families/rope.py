"""Which rotary embeddings are supported, read from a config.json of any version of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Supported type -> the settings it needs. Their frequencies do not depend on the length of a sequence."""
YARN = "yarn"
LATENT_TYPES = {"default": (), YARN: ("factor", "original_max_position_embeddings")}
"""The same for latent attention, whose softmax has a scale of its own under yarn (Peng et al., arXiv:2309.00071)."""


def rope_of(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings of a config.json: `rope_parameters`, or `rope_scaling` before transformers 5."""
    return settings.get("rope_parameters") or settings.get("rope_scaling") or {}


def rope_type(settings: Mapping[str, Any]) -> str:
    """The type of the rotary embedding of a config.json."""
    rope = rope_of(settings)
    kind: str = rope.get("rope_type", rope.get("type", "default"))
    return kind


def rope_problem(settings: Mapping[str, Any], *, is_latent: bool = False) -> str | None:
    """What is wrong with the rotary embedding that a config.json asks for; None when it is supported.

    is_latent: it turns keys and queries of latent attention.
    """
    kind, rope, known = rope_type(settings), rope_of(settings), LATENT_TYPES if is_latent else ROPE_TYPES
    if not isinstance(kind, str) or kind not in known:
        return f"rope_type={kind!r} is not supported; known: {', '.join(known)}"
    lacking = [name for name in known[kind] if not isinstance(rope.get(name), int | float)]
    if lacking:
        return f"rope_type={kind!r} needs numbers for {', '.join(lacking)}; it has {dict(rope)}"
    fraction = rope.get("partial_rotary_factor", 1.0)
    if fraction != 1.0:
        return f"partial_rotary_factor={fraction} is not supported; nearest: 1.0"
    if kind == YARN:
        return _yarn_problem(rope)
    return None


def _yarn_problem(rope: Mapping[str, Any]) -> str | None:
    """What transformers and vLLM read differently."""
    odd = [name for name in ("attention_factor", "truncate") if rope.get(name) is not None]
    if odd:
        return f"yarn with {', '.join(odd)} is not supported, because vLLM does not read it as transformers does"
    if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
        return "yarn needs both of mscale and mscale_all_dim, or neither: transformers and vLLM differ on one alone"
    return None


def yarn_growth(factor: float, mscale: float) -> float:
    """How much yarn lets logits grow with the context: 0.1 m ln(factor) + 1 above factor 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_growth(settings: Mapping[str, Any]) -> float:
    """What latent attention multiplies the usual scale of its softmax with; 1 without yarn."""
    rope = rope_of(settings)
    if rope_type(settings) != YARN or not rope.get("mscale_all_dim"):
        return 1.0
    return yarn_growth(rope["factor"], rope["mscale_all_dim"]) ** 2
