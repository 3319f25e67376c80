"""MiniMax-M2, by MiniMax."""

from __future__ import annotations

from megatron_rl.model.families.attention_keys import AttentionKeys
from megatron_rl.model.families.family import Carried, Family
from megatron_rl.model.parts import Experts, Scoring

FAMILIES = (
    # MiniMax-M2: norms over all heads, a part of every head turns, experts by sigmoid scores and a bias in one group.
    Family(
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2ForSequenceClassification",  # which transformers does not have: only critics here start from one
        own_type="minimax_m2",
        qk_norm=True,
        attention=AttentionKeys(partial_rotary=1.0, turned_key="rotary_dim", joint_norms=True),
        experts=Experts(
            block="block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
            count_keys=("num_local_experts",),
            size_key="intermediate_size",
            norm_topk_prob=True,
            scoring=Scoring("sigmoid", best=1, bias="e_score_correction_bias", normalised=True),
        ),
        fixed={
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "shared_intermediate_size": 0,
        },
        rollout={"scoring_func": "sigmoid", "use_routing_bias": True},
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "max_position_embeddings": 196608,
            "rope_theta": 5_000_000.0,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "eos_token_id": 200020,
        },
        carried=Carried(ahead_key="num_mtp_modules"),
    ),
)
