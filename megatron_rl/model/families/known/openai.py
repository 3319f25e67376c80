"""gpt-oss, by OpenAI."""

from __future__ import annotations

from megatron_rl.model.families.attention_keys import SinkKeys
from megatron_rl.model.families.family import Family
from megatron_rl.model.parts import Experts, ExpertStacks

YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
FAMILIES = (
    # gpt-oss: sinks, a window in every second layer, experts with biases and bounded gates, published in 4 bits.
    Family(
        "GptOssForCausalLM",
        "GptOssForSequenceClassification",
        qkv_bias=True,
        attention=SinkKeys(local=True),
        experts=Experts(
            router="router",
            router_bias=True,
            count_keys=("num_local_experts",),
            size_key="intermediate_size",
            norm_topk_prob=True,
            stacks=ExpertStacks(),
        ),
        # vLLM has these two numbers in its code.
        fixed={"attention_bias": True, "rms_norm_eps": 1e-5, "swiglu_limit": 7.0},
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "rope_theta": 150_000.0,
            "rope_parameters": YARN | {"original_max_position_embeddings": 4096},
            "sliding_window": 128,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "eos_token_id": None,
        },
        engine_names={"embed_tokens": "embedding", "self_attn": "attn"},
        unpacked=("mxfp4",),
    ),
)
