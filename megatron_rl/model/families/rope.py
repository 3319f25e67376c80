"""Rotary embeddings of a config.json, of any version of transformers, and which of them are supported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.model.families.attention_keys import GLOBAL, LOCAL, PROPORTIONAL, YARN, AttentionKeys


def rope_of(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings of a config.json: `rope_scaling`, as before transformers 5, or else `rope_parameters`.

    transformers takes the former where a config.json has both.
    """
    return settings.get("rope_scaling") or settings.get("rope_parameters") or {}


def ropes_of(keys: AttentionKeys, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Kind of layer -> its rotary settings with their base, in families with two embeddings; else {}."""
    if keys.thetas is None:
        return {}
    given, scaled = settings.get("rope_parameters") or {}, settings.get("rope_scaling") or {}
    if not given and not scaled:
        given = keys.absent_ropes
    ropes = {kind: dict(given.get(kind) or {}) for kind in (GLOBAL, LOCAL)}
    ropes[GLOBAL] |= scaled  # before transformers 5 only layers without a window are scaled
    older = (settings.get("rope_theta"), settings.get("rope_local_base_freq"))
    for kind, beside, absent in zip((GLOBAL, LOCAL), older, keys.thetas, strict=True):
        ropes[kind]["rope_theta"] = ropes[kind].get("rope_theta") or beside or absent
        ropes[kind]["rope_type"] = rope_type({"rope_parameters": ropes[kind]})
    return ropes


def rope_type(settings: Mapping[str, Any]) -> str:
    """The type of the rotary embedding of a config.json."""
    rope = rope_of(settings)
    kind: str = rope.get("rope_type", rope.get("type", "default"))
    return kind


def rope_problem(settings: Mapping[str, Any], keys: AttentionKeys | None = None) -> str | None:
    """Why the rotary embedding of a config.json is not supported; None if it is.

    keys: those of the family; None: plain attention.
    """
    keys = keys or AttentionKeys()
    nested = settings.get("rope_parameters") or {}
    odd = [kind for kind in (GLOBAL, LOCAL) if not isinstance(nested.get(kind) or {}, Mapping)]
    if odd and keys.thetas is not None:
        return f"{odd[0]} must be an object in braces"
    for kind, own in ropes_of(keys, settings).items():
        problem = rope_problem({"rope_parameters": own}, replace(keys, thetas=None))
        if problem is not None:
            return f"of {kind} {problem}"
    if keys.thetas is not None:
        return None
    kind, rope, known = rope_type(settings), rope_of(settings), keys.rope_types
    if not isinstance(kind, str) or kind not in known:
        return f"rope_type={kind!r} is not supported; known: {', '.join(known)}"
    lacking = [name for name in known[kind] if not _is_above_0(rope.get(name))]
    if lacking:
        return f"rope_type={kind!r} needs finite numbers > 0 for {', '.join(lacking)}; it has {dict(rope)}"
    if rope.get("rope_theta") is not None and not _is_above_0(rope["rope_theta"]):
        return f"rope_theta={rope['rope_theta']!r} must be a finite number > 0"
    if kind == "llama3" and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        return f"low_freq_factor={rope['low_freq_factor']} must be below high_freq_factor={rope['high_freq_factor']}"
    fraction = rope.get("partial_rotary_factor", 1.0)
    if not isinstance(fraction, int | float):
        return f"partial_rotary_factor={fraction!r} must be a number"
    if kind == PROPORTIONAL:
        return _proportional_problem(rope, fraction)
    if keys.partial_rotary is None and fraction != 1.0:
        return f"partial_rotary_factor={fraction} is not supported; try: 1.0"
    if kind == YARN:
        return _yarn_problem(rope, keys.differing_yarn)
    return None


def _is_above_0(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _proportional_problem(rope: Mapping[str, Any], fraction: float) -> str | None:
    if not 0 < fraction <= 1:
        return f"partial_rotary_factor={fraction} must be above 0 and at most 1"
    if rope.get("factor") not in (None, 1.0):
        return f"factor={rope['factor']} of rope_type={PROPORTIONAL!r} is not supported, because vLLM does not read it"
    return None


def _yarn_problem(rope: Mapping[str, Any], differing: tuple[str, ...]) -> str | None:
    """Settings of yarn that transformers and vLLM read differently."""
    odd = [name for name in differing if rope.get(name) is not None]
    if odd:
        return f"yarn with {', '.join(odd)} is not supported, because vLLM does not read it as transformers does"
    if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
        return "yarn needs both of mscale and mscale_all_dim, or neither: transformers and vLLM differ on one alone"
    return None


def yarn_growth(factor: float, mscale: float) -> float:
    """Yarn's scale of logits: 0.1 m ln(factor) + 1 above factor 1, else 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_growth(settings: Mapping[str, Any]) -> float:
    """Factor of the softmax scale of latent attention; 1 without yarn."""
    rope = rope_of(settings)
    if rope_type(settings) != YARN or not rope.get("mscale_all_dim"):
        return 1.0
    return yarn_growth(rope["factor"], rope["mscale_all_dim"]) ** 2
