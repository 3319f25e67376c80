"""Qwen3 with experts, in all layers or in those that config.json names."""

from megatron_rl.model.families.family import Experts, Family, Window
from megatron_rl.model.families.layers import STEP_RULE

FAMILY = Family(
    "Qwen3MoeForCausalLM",
    "Qwen3MoeForSequenceClassification",
    qk_norm=True,
    experts=Experts(dense_keys=STEP_RULE),
    window=Window(switch="use_sliding_window", default=4096),
)
