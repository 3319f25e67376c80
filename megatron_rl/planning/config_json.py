"""Check types and sizes of a model's config.json, so that later checks can rely on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from megatron_rl.model.families.refused import refusal_of

LARGEST_NUMBER = 2**31 - 1
LARGEST = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 10_000)
LARGEST["num_global_key_value_heads"] = 10_000
LARGEST |= dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group"),
    10_000,
)
LARGEST |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"), 10_000)
LARGEST |= dict.fromkeys(
    (
        "linear_key_head_dim",
        "linear_value_head_dim",
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "head_dim",
        "global_head_dim",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "vocab_size",
    ),
    1 << 24,
)
"""Key -> limit for sizes that a plan enumerates or splits into messages; other sizes may have 31 bits."""


def is_size(value: object) -> bool:
    """Return whether a value is a whole number >= 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def wrong_types(settings: dict[str, Any]) -> dict[str, str]:
    """Return key -> rule, for every key whose value has a wrong type."""
    wrong = {}
    for key, (holds, meaning) in TYPES.items():
        if settings.get(key) is not None and not holds(settings[key]):
            wrong[key] = f"must be {meaning}"
    return wrong


def not_finite(settings: dict[str, Any]) -> set[str]:
    """Return keys with a NaN or an infinity in their value: Python reads these though JSON has neither."""
    return {key for key, value in settings.items() if not _is_finite(value)}


def _is_finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def too_large(settings: dict[str, Any], keys: tuple[str, ...]) -> dict[str, int]:
    """Return key -> limit, for every one of `keys` whose value exceeds it."""
    limits = {key: LARGEST.get(key, LARGEST_NUMBER) for key in keys}
    return {key: limit for key, limit in limits.items() if is_size(settings.get(key)) and settings[key] > limit}


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_token_numbers(value: object) -> bool:
    """Return whether a value is one token id, or a list of some."""
    numbers = value if isinstance(value, list) else [value]
    return len(numbers) > 0 and all(type(number) is int and number >= 0 for number in numbers)


def _is_count(value: object) -> bool:
    """Return whether a value is a whole number >= 0."""
    return type(value) is int and value >= 0


def _are_numbers(value: object) -> bool:
    """Return whether a value is a list, possibly empty, of whole numbers >= 0."""
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _is_above_0(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


TYPES: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("architectures", "layer_types", "mlp_layer_types"), (_is_names, "a list of names")),
    **dict.fromkeys(
        ("rope_parameters", "rope_scaling", "id2label", "per_layer_config"), (_is_object, "an object in braces")
    ),
    **dict.fromkeys(("num_key_value_heads", "head_dim"), (is_size, "a whole number >= 1")),
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads"), (is_size, "a whole number >= 1")),
    **dict.fromkeys(("num_labels", "decoder_sparse_step"), (is_size, "a whole number >= 1")),
    **dict.fromkeys(("q_lora_rank", "n_group", "topk_group"), (is_size, "a whole number >= 1")),
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts"), (_is_count, "a whole number >= 0")),
    **dict.fromkeys(("num_nextn_predict_layers", "sliding_window"), (_is_count, "a whole number >= 0")),
    **dict.fromkeys(("query_pre_attn_scalar", "attn_logit_softcapping"), (_is_above_0, "a finite number > 0")),
    **dict.fromkeys(("final_logit_softcapping", "rope_local_base_freq"), (_is_above_0, "a finite number > 0")),
    "partial_rotary_factor": (_is_above_0, "a finite number > 0"),
    "full_attention_interval": (is_size, "a whole number >= 1"),
    "rotary_dim": (is_size, "a whole number >= 1"),
    "num_mtp_modules": (_is_count, "a whole number >= 0"),
    "sliding_window_pattern": (is_size, "a whole number >= 1"),
    "routed_scaling_factor": (_is_above_0, "a finite number > 0"),
    "mlp_only_layers": (_are_numbers, "a list of whole numbers >= 0"),
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), (_is_above_0, "a finite number > 0")),
    "eos_token_id": (_is_token_numbers, "a token id, or a list of token ids"),
    "model_type": (_is_name, "a name"),
    **dict.fromkeys(("tie_word_embeddings", "norm_topk_prob", "use_sliding_window"), (_is_flag, "true or false")),
    **dict.fromkeys(("attention_bias", "use_qk_norm", "attention_k_eq_v"), (_is_flag, "true or false")),
}
"""Key that may be missing or null -> check of its value, and what it must be."""


def feature_of(architecture: str) -> str:
    """Return the name of the feature that an unknown architecture needs."""
    return refusal_of(architecture).needs
