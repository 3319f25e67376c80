"""Llama 2, 3, 3.1, 3.2, 3.3 and what shares their architecture."""

from __future__ import annotations

from megatron_rl.model.families.family import Family

FAMILIES = (
    # Llama 2, 3, 3.1, 3.2, 3.3 and what shares their architecture.
    Family("LlamaForCausalLM", "LlamaForSequenceClassification"),
)
