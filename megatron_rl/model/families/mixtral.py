"""Mixtral: Mistral's attention, experts under names of their own, and a softmax over the chosen experts alone."""

from megatron_rl.model.families.family import Experts, Family, Window

FAMILY = Family(
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
)
