"""Qwen3, dense and with experts."""

from __future__ import annotations

from megatron_rl.model.families.family import STEP_RULE, Family
from megatron_rl.model.families.known.qwen2 import NO_END, WINDOW
from megatron_rl.model.parts import Experts

FAMILIES = (
    # Qwen3, dense.
    Family("Qwen3ForCausalLM", "Qwen3ForSequenceClassification", qk_norm=True, window=WINDOW, defaults=NO_END),
    # Qwen3 with experts, in all layers or in those that config.json names.
    Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeForSequenceClassification",
        qk_norm=True,
        experts=Experts(dense_keys=STEP_RULE),
        window=WINDOW,
        defaults=NO_END | {"num_key_value_heads": 4},
    ),
)
