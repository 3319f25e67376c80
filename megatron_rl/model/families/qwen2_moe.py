"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, and a gated MLP for every token beside the experts."""

from megatron_rl.model.families.family import Experts, Family, SharedExperts, Window
from megatron_rl.model.families.layers import STEP_RULE

FAMILY = Family(
    "Qwen2MoeForCausalLM",
    "Qwen2MoeForSequenceClassification",
    qkv_bias=True,
    experts=Experts(
        dense_keys=STEP_RULE,
        shared=SharedExperts("shared_expert", size_key="shared_expert_intermediate_size", gate="shared_expert_gate"),
    ),
    window=Window(switch="use_sliding_window", default=4096),
    fixed={"qkv_bias": True},
)
