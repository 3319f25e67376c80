"""Qwen3, dense."""

from megatron_rl.model.families.family import Family, Window

FAMILY = Family(
    "Qwen3ForCausalLM",
    "Qwen3ForSequenceClassification",
    qk_norm=True,
    window=Window(switch="use_sliding_window", default=4096),
)
