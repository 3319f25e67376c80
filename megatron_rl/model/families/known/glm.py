"""GLM, by Z.ai."""

from __future__ import annotations

from megatron_rl.model.families.attention_keys import AttentionKeys, LatentKeys
from megatron_rl.model.families.family import KINDS_RULE, Carried, Family, MTPForm, first_rule
from megatron_rl.model.families.known.deepseek import BIAS, SHARED
from megatron_rl.model.parts import Experts, Scoring

FAMILIES = (
    # GLM-4.5, 4.6, 4.7: half of every head turns; experts are chosen by sigmoid scores and a bias as in DeepSeek-V3.
    Family(
        "Glm4MoeForCausalLM",
        "Glm4MoeForSequenceClassification",  # which transformers does not have: only critics here start from one
        qkv_bias_key="attention_bias",
        qk_norm_key="use_qk_norm",
        attention=AttentionKeys(partial_rotary=0.5),
        experts=Experts(
            count_keys=("n_routed_experts", "num_local_experts"),
            dense_keys=first_rule(absent=1),
            shared=SHARED,
            scoring=Scoring("sigmoid", best=2, bias=BIAS, normalised=True),
        ),
        defaults={
            "num_key_value_heads": 8,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": True,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "eos_token_id": None,
        },
        carried=Carried(ahead_key="num_nextn_predict_layers", mtp=MTPForm("Glm4MoeMTPModel")),
    ),
    # GLM-4.7-Flash: latent attention, and experts chosen as in GLM-4.5.
    Family(
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteForSequenceClassification",  # which transformers does not have, too
        attention=LatentKeys(),
        experts=Experts(
            count_keys=("n_routed_experts", "num_local_experts"),
            dense_keys=KINDS_RULE,
            shared=SHARED,
            scoring=Scoring("sigmoid", best=2, bias=BIAS, scale=1.8, normalised=True),
        ),
        fixed={
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "rope_interleave": True,
        },
        defaults={
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 1,
        },
        carried=Carried(ahead_key="num_nextn_predict_layers", mtp=MTPForm("Glm4MoeLiteMTPModel")),
    ),
)
