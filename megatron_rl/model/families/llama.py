"""Llama 2, 3, 3.1, 3.2, 3.3 and what shares their architecture."""

from megatron_rl.model.families.family import Family

FAMILY = Family("LlamaForCausalLM", "LlamaForSequenceClassification")
