"""Google's Gemma 4, the dense language models."""

from __future__ import annotations

from megatron_rl.model.families.family import Family, Style
from megatron_rl.model.families.wide_heads import WideHeadKeys

EMBEDDINGS = "embeddings of every layer, as in E2B and E4B, would have to reach every pipeline stage"
HANDED_ON = "layers that use the keys and values of others, as in E2B and E4B, would have to be in their pipeline stage"
BESIDE = "experts in parallel with a dense MLP, as in 26B-A4B, with a router that has norms and scales of its own"

FAMILIES = (
    # Gemma-4: wide heads in layers without a window, normalised values, a scale of each layer.
    Family(
        "Gemma4ForCausalLM",
        "Gemma4TextForSequenceClassification",  # which transformers does not have: only critics here start from one
        own_type="gemma4_text",
        qk_norm=True,
        attention=WideHeadKeys(local=True, period=6, thetas=(1_000_000.0, 10_000.0), ends_global=True),
        style=Style(
            "gelu_pytorch_tanh",
            norms_after=True,
            scaled_embedding=True,
            head_cap="final_logit_softcapping",
            layer_scales=True,
        ),
        fixed={
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "enable_moe_block": False,
            "num_experts": None,
        },
        reasons={
            "hidden_size_per_layer_input": EMBEDDINGS,
            "num_kv_shared_layers": HANDED_ON,
            "use_double_wide_mlp": HANDED_ON,
            "enable_moe_block": BESIDE,
            "num_experts": BESIDE,
        },
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 4,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
            "tie_word_embeddings": True,
            "final_logit_softcapping": None,
            "eos_token_id": 1,
        },
    ),
)
