"""Google's Gemma: windows, bounds, and norms around every part of a layer; Gemma 4: the dense language models."""

from __future__ import annotations

from megatron_rl.model.families.attention_keys import AttentionKeys
from megatron_rl.model.families.family import Carried, Family, Style
from megatron_rl.model.families.wide_heads import WideHeadKeys

GEMMA_STYLE = Style("gelu_pytorch_tanh", True, True, True, "final_logit_softcapping")
GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}

# Gemma-3, the language models: five layers with windows and a rotary embedding of their own to one without.
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "Gemma3TextForSequenceClassification",
    own_type="gemma3_text",
    qk_norm=True,
    attention=AttentionKeys(
        scale="query_pre_attn_scalar",
        local=True,
        period=6,
        period_key="sliding_window_pattern",
        thetas=(1_000_000.0, 10_000.0),
    ),
    style=GEMMA_STYLE,
    # vLLM reads no bound on products of this family, so there must be none.
    fixed={"attn_logit_softcapping": None},
    defaults=GEMMA_DEFAULTS | {"final_logit_softcapping": None},
)
GEMMA3_INSIDE = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
}
"""What transformers takes where text_config has none."""

EMBEDDINGS = "embeddings of every layer, as in E2B and E4B, would have to reach every pipeline stage"
HANDED_ON = "layers that use the keys and values of others, as in E2B and E4B, would have to be in their pipeline stage"
BESIDE = "experts in parallel with a dense MLP, as in 26B-A4B, with a router that has norms and scales of its own"
"""Why parts of Gemma 4 are not supported."""

FAMILIES = (
    # Gemma-2: windows in every second layer, bounded products and logits, norms around every part of a layer.
    Family(
        "Gemma2ForCausalLM",
        "Gemma2ForSequenceClassification",
        attention=AttentionKeys(scale="query_pre_attn_scalar", soft_cap="attn_logit_softcapping", local=True),
        style=GEMMA_STYLE,
        defaults=GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    GEMMA3,
    # Gemma-3 with a vision tower. Its folders leave out what the language models' say.
    GEMMA3.within(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        carried=Carried(("vision_tower.", "multi_modal_projector.")),
        defaults=GEMMA3_INSIDE,
        folder_prefix="language_model.model.",
    ),
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
