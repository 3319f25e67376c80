"""Qwen2 and Qwen2.5."""

from megatron_rl.model.families.family import Family, Window

FAMILY = Family(
    "Qwen2ForCausalLM",
    "Qwen2ForSequenceClassification",
    qkv_bias=True,
    window=Window(switch="use_sliding_window", default=4096),
)
