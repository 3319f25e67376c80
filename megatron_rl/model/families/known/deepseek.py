"""DeepSeek's models: latent attention, and experts chosen by scores in groups."""

from __future__ import annotations

from megatron_rl.model.families.attention_keys import LatentKeys
from megatron_rl.model.families.family import Carried, Family, MTPForm, first_rule
from megatron_rl.model.parts import Experts, Scoring, SharedExperts

SHARED = SharedExperts("shared_experts", size_key="moe_intermediate_size", count_key="n_shared_experts")
BIAS = "gate.e_score_correction_bias"

FAMILIES = (
    # DeepSeek-V2: latent attention, and experts chosen by softmax scores in groups.
    Family(
        "DeepseekV2ForCausalLM",
        "DeepseekV2ForSequenceClassification",
        attention=LatentKeys(),
        experts=Experts(
            count_keys=("n_routed_experts",),
            norm_topk_prob=False,
            dense_keys=first_rule(absent=0),
            shared=SHARED,
            scoring=Scoring("softmax", best=1, method=("topk_method", "group_limited_greedy")),
        ),
        fixed={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
        rollout={"scoring_func": "softmax"},
        defaults={"n_shared_experts": 2},
    ),
    # DeepSeek-V3, Moonlight and Kimi-K2: latent attention, and experts chosen by sigmoid scores and a bias.
    Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3ForSequenceClassification",
        attention=LatentKeys(),
        experts=Experts(
            count_keys=("n_routed_experts",),
            dense_keys=first_rule(absent=3),
            shared=SHARED,
            scoring=Scoring("sigmoid", best=2, bias=BIAS, scale=2.5, normalised=True),
        ),
        fixed={
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "rope_interleave": True,
        },
        rollout={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        defaults={"n_shared_experts": 1, "n_group": 8, "topk_group": 4, "eos_token_id": 1},
        carried=Carried(ahead_key="num_nextn_predict_layers", mtp=MTPForm("DeepSeekMTPModel")),
        other_types=("kimi_k2",),
    ),
)
