"""Mistral 7B and what shares its architecture: Llama's tensors, with a sliding window in the first version."""

from megatron_rl.model.families.family import Family, Window

FAMILY = Family("MistralForCausalLM", "MistralForSequenceClassification", window=Window(default=4096))
