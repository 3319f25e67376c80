"""DeepSeek-V2: latent attention, and experts chosen by softmax scores in groups."""

from megatron_rl.model.families.family import Experts, Family, Scoring, SharedExperts
from megatron_rl.model.families.layers import first_rule

FAMILY = Family(
    "DeepseekV2ForCausalLM",
    "DeepseekV2ForSequenceClassification",
    latent_attention=True,
    experts=Experts(
        count_keys=("n_routed_experts",),
        norm_topk_prob=False,
        dense_keys=first_rule(absent=0),
        shared=SharedExperts("shared_experts", size_key="moe_intermediate_size", count_key="n_shared_experts"),
        scoring=Scoring("softmax", best=1, method=("topk_method", "group_limited_greedy")),
    ),
    fixed={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
    rollout={"scoring_func": "softmax"},
)
