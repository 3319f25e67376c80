"""Mistral's dense model, and Mixtral with experts."""

from __future__ import annotations

from megatron_rl.model.families.family import Family, Window
from megatron_rl.model.parts import Experts

FAMILIES = (
    # Mistral 7B: Llama's tensors, with a sliding window in the first version.
    Family(
        "MistralForCausalLM",
        "MistralForSequenceClassification",
        window=Window(default=4096),
        defaults={"num_key_value_heads": 8},
    ),
    # Mistral's attention, experts under names of their own, and a softmax over the chosen experts alone.
    Family(
        "MixtralForCausalLM",
        "MixtralForSequenceClassification",
        experts=Experts(
            block="block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
            count_keys=("num_local_experts",),
            size_key="intermediate_size",
            norm_topk_prob=True,
        ),
        window=Window(),
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
)
