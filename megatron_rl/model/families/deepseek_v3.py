"""DeepSeek-V3, and Moonlight: latent attention, and experts chosen by sigmoid scores and a bias."""

from megatron_rl.model.families.family import Experts, Family, Scoring, SharedExperts
from megatron_rl.model.families.layers import first_rule

FAMILY = Family(
    "DeepseekV3ForCausalLM",
    "DeepseekV3ForSequenceClassification",
    latent_attention=True,
    experts=Experts(
        count_keys=("n_routed_experts",),
        dense_keys=first_rule(absent=3),
        shared=SharedExperts("shared_experts", size_key="moe_intermediate_size", count_key="n_shared_experts"),
        scoring=Scoring("sigmoid", best=2, bias="gate.e_score_correction_bias", scale=2.5, normalised=True),
    ),
    fixed={
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "rope_interleave": True,
    },
    rollout={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ahead_key="num_nextn_predict_layers",
)
