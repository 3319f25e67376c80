"""Qwen2 and Qwen2.5, dense and with experts."""

from __future__ import annotations

from megatron_rl.model.families.family import STEP_RULE, Family, Window
from megatron_rl.model.parts import Experts, SharedExperts

WINDOW = Window(switch="use_sliding_window", default=4096)
NO_END = {"eos_token_id": None}

FAMILIES = (
    # Qwen2 and Qwen2.5.
    Family("Qwen2ForCausalLM", "Qwen2ForSequenceClassification", qkv_bias=True, window=WINDOW, defaults=NO_END),
    # Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, and a gated MLP for every token next to the experts.
    Family(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeForSequenceClassification",
        qkv_bias=True,
        experts=Experts(
            dense_keys=STEP_RULE,
            shared=SharedExperts(
                "shared_expert", size_key="shared_expert_intermediate_size", gate="shared_expert_gate"
            ),
        ),
        window=WINDOW,
        defaults=NO_END,
        fixed={"qkv_bias": True},
    ),
)
